"""The audit of a run's receipts (its records of sampled tokens, trained tokens, weights and steps)."""

import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl.cli.audit_command import main
from asyncrl.core import receipts
from asyncrl.core.receipts import Act, note, token_digest
from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from learner.trajectory_log import trained_groups
from learner.types import GroupShare, RankBatch, group_sequences
from tests.asyncrl.test_run_lives import make_life
from tests.support.checkpoints import save

IDS = np.array([5, 6, 7, 8], dtype=np.int32)


def group_of(group_id, versions, attempt=0):
    """Return a group with two answers of four tokens each."""
    prompt = Turn.given(np.array([1, 2], dtype=np.int32))
    turns = [
        Turn(
            token_ids=IDS + place,
            parent=0,
            sampled=True,
            logprobs=np.full(4, -1.0, dtype=np.float32),
            versions=np.array(versions, dtype=np.int32),
        )
        for place in range(2)
    ]
    trajectories = [Trajectory(turns=(prompt, turn), reward=float(place)) for place, turn in enumerate(turns)]
    return TrajectoryGroup.from_trajectories(trajectories, group_id=group_id, attempt=attempt)


def trained_on(group, step, samples):
    share = GroupShare(group_id=group.group_id, samples=samples, rewards=np.zeros(len(samples)), mini_batch=0)
    batch = RankBatch(version=step, shares=(share,), max_lag=2)
    return trained_groups(batch, {group.group_id: group}, group_sequences(group, samples=samples))


def write_life(folder, steps, *, resumed=None, before=()):
    """Write the receipts (records of tokens and steps) of one start of a run. Each step has one group.

    If a group is in attempt 1, engine-1 sampled its first four tokens in attempt 0.
    """
    make_life(folder, resumed=resumed, status=0)
    receipts.start(folder, "all")
    for step in steps:
        for version in {step, max(0, step - 1)}:
            note(Act.published, version=version, digest=f"d{version}")
            for engine in ("engine-0", "engine-1"):
                note(Act.loaded, engine=engine, version=version, digest=f"d{version}")
    for step, group in steps.items():
        inherited = {}
        if group.attempt:
            inherited = {str(max(0, step - 1)): 4}
            note(Act.sampled, engine="engine-1", group=group.group_id, attempt=0, versions=inherited, inherited={})
        versions = receipts.counts_of(group.policy_versions)
        sampled = {"group": group.group_id, "attempt": group.attempt, "versions": versions, "inherited": inherited}
        note(Act.sampled, engine="engine-0", **sampled)
        for rank in range(2):
            note(Act.trained, step=step, rank=rank, groups=trained_on(group, step, (rank,)))
        summary = group.summary
        planned = {"group": group.group_id, "attempt": group.attempt, "tokens": 8, "digest": summary.digest}
        note(Act.planned, step=step, groups=[planned | {"is_scored": True}])
        note(Act.committed, step=step)
    receipts.stop()
    all_steps = {**dict(before), **steps}
    lines = [{"step": step, "learner.num_tokens": 8.0} for step in sorted(all_steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lags = [step - group.summary.oldest_version for step, group in all_steps.items()]
    trained = 8 * len(all_steps)
    summary = {
        "tokens": {"generated": trained + 5, "trained": trained, "dropped": 3, "buffered": 2, "in_flight": 0},
        "max_lag": {"histogram": {str(lag): lags.count(lag) for lag in {*lags}}},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def run(tmp_path):
    """Write the receipts (records of tokens and steps) of a run that was started and then resumed.

    Before the resume, the run made three steps, but the last step was lost. After the resume, it made two steps.
    """
    first = {0: group_of(0, [0] * 4), 1: group_of(1, [0, 0, 1, 1], attempt=1), 2: group_of(2, [2] * 4)}
    one = write_life(tmp_path / "1", first)
    checkpoint = save(one / "checkpoints", 2)
    second = {2: group_of(2, [1, 1, 2, 2], attempt=1), 3: group_of(3, [3] * 4)}
    return write_life(tmp_path / "2", second, resumed=checkpoint, before={0: first[0], 1: first[1]}.items())


def change(run: Path, act, chosen, **values):
    """Change receipts (records of tokens and steps) of the kind ``act``.

    The function changes only the receipts whose fields have the values in ``chosen``. ``values`` maps the names of
    fields to their new values.
    """
    path = run / "receipts" / "all.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["act"] == act and all(line[name] == value for name, value in chosen.items()):
            line.update(values)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_audit_follows_all_tokens_from_their_engines_to_their_steps(run, capsys):
    assert main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "checked: 2 lives, 4 steps and 32 tokens, each token from its engine to its learner step",
        "checked: the account of all lives: 37 tokens generated, 32 trained, 0 reused",
        f"0 bad receipts in {run}",
    ]


def test_the_audit_names_step_and_group_of_a_rank_that_trains_on_unplanned_tokens(run, capsys):
    other = group_of(3, [3] * 4)
    other.token_ids[-1] += 1
    change(run, Act.trained, {"step": 3, "rank": 1}, groups=trained_on(other, 3, (1,)))
    assert main([str(run)]) == 1
    out = capsys.readouterr().out
    assert (
        f"bad: run {run.parent.name}, life 2, step 3, group 3: what the ranks trained on must be {{'attempt': 0, "
        in out
    )
    assert "1 bad receipts" in out


@pytest.mark.long
@pytest.mark.parametrize(
    ("act", "chosen", "values", "words"),
    [
        (Act.trained, {"step": 3, "rank": 1}, {"groups": []}, "group 3: what the ranks trained on must be"),
        (Act.trained, {"step": 2, "rank": 0}, {"step": 9}, "group 2: what the ranks trained on must be"),
        (Act.planned, {"step": 3}, {"step": 4}, "group 3: what the ranks trained on must be None"),
        (Act.committed, {"step": 3}, {"step": 5}, "step 4: the step must be on record, got no receipt"),
        (Act.loaded, {"engine": "engine-0", "version": 3}, {"digest": "d0"}, "the digest of version 3 that engine-0"),
        (Act.loaded, {"engine": "engine-1", "version": 1}, {"version": 9}, "the digest of version 1 that engine-1"),
        (Act.published, {"version": 3}, {"digest": "dx"}, "must be ['dx'], got ['d3']"),
        (Act.sampled, {"engine": "engine-0", "group": 3}, {"group": 4}, "group 3: an engine's receipt must be tokens"),
        (Act.sampled, {"engine": "engine-1", "group": 2}, {"group": 4}, "group 2: an engine's receipt must be tokens"),
    ],
)
def test_the_audit_names_a_wrong_or_missing_receipt(run, capsys, act, chosen, values, words):
    change(run, act, chosen, **values)
    assert main([str(run)]) == 1
    assert words in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("num_killed", [1, 2])
def test_the_audit_finds_the_engine_of_a_group_that_a_killed_life_sampled(run, capsys, num_killed):
    """An engine of a run samples group 3, then the run is killed and resumed.

    The resumed run finds the group in the buffer's journal and trains on the group. With ``num_killed=2``, the run is
    killed twice, and the engine samples the group between the two kills.
    """
    checkpoint = run.parent / "1" / "checkpoints" / "v00000002"
    start = checkpoint
    if num_killed == 2:
        first = write_life(run.parent / "1a", {2: group_of(4, [2] * 4)}, resumed=checkpoint)
        start = save(first / "checkpoints", 2)
    killed = write_life(run.parent / "1b", {2: group_of(3, [2] * 4)}, resumed=start)
    (killed / "summary.json").unlink()
    newest = {2: group_of(2, [2] * 4), 3: group_of(3, [2] * 4)}
    before = {step: group_of(step, [0] * 4) for step in range(2)}
    last = write_life(run.parent / "3", newest, resumed=checkpoint, before=before.items())
    change(last, Act.sampled, {"group": 3}, group=99)
    assert main([str(last)]) == 0, capsys.readouterr().out
    assert f"2 lives (and engines of {num_killed + 1} more lives, whose steps were lost)" in capsys.readouterr().out
    change(killed, Act.loaded, {"version": 2}, digest="d0")
    assert main([str(last)]) == 1
    assert "the digest of version 2 that engine-0 of life 1b verified" in capsys.readouterr().out


def test_a_step_in_a_checkpoint_counts_even_without_a_record_of_its_commit(run, capsys):
    # Remove the records of two commits: step 1, the checkpoint's last step, and step 2, the resumed run's first step.
    for life, step in ((run.parent / "1", 1), (run, 2)):
        path = life / "receipts" / "all.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line) != {"act": Act.committed, "step": step}]
        assert len(kept) == len(lines) - 1
        path.write_text("".join(kept))
    assert main([str(run)]) == 0, capsys.readouterr().out
    assert "4 steps and 32 tokens" in capsys.readouterr().out


def test_a_receipt_that_does_not_fit_on_the_disk_is_written_later_as_a_whole_line(tmp_path, monkeypatch, caplog):
    receipts.start(tmp_path, "all")
    note(Act.committed, step=0)
    with monkeypatch.context() as patch:
        write = receipts.os.write
        patch.setattr(receipts.os, "write", lambda descriptor, line: write(descriptor, line[:9]))
        note(Act.committed, step=1)
    assert (tmp_path / "receipts" / "all.jsonl").read_text().count("\n") == 1
    note(Act.committed, step=2)
    receipts.stop()
    lines = (tmp_path / "receipts" / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert "is not written to" in caplog.text


def test_the_audit_finds_a_token_beyond_the_lag_bound(run, capsys):
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("max_lag: 2", "max_lag: 0"))
    assert main([str(run)]) == 1
    assert "step 2, group 2: the versions of the tokens must be 2 to 2, got [1]" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, '{"a": ', "total_steps: 4\ncheckpoint: {directory: ''}\n"])
def test_the_audit_refuses_a_missing_or_damaged_configuration_and_names_it(run, capsys, text):
    (run / "config.yaml").unlink()
    if text is not None:
        (run / "config.yaml").write_text(text)
    assert main([str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {run}/config.yaml must hold the options of the run as YAML")
    assert error.endswith("; restore the file from a copy\n")
    assert error.count("\n") == 1


def test_the_audit_finds_a_lost_token_and_names_an_unchecked_account(run, capsys):
    summary = json.loads((run / "summary.json").read_text())
    summary["tokens"]["trained"] -= 1
    (run / "summary.json").write_text(json.dumps(summary))
    assert main([str(run)]) == 1
    out = capsys.readouterr().out
    assert "the generated tokens, trained + dropped + buffered + in_flight must be 36, got 37" in out
    assert "the trained tokens of the account must be 32, got 31" in out
    (run / "summary.json").unlink()
    assert main([str(run)]) == 0
    assert "not checked: the account: " in capsys.readouterr().out


def test_the_audit_finds_a_prompt_that_two_steps_consumed(run, capsys):
    line = next(
        json.loads(line)
        for line in (run.parent / "1" / "receipts" / "all.jsonl").read_text().splitlines()
        if json.loads(line)["act"] == Act.planned
    )
    change(run, Act.planned, {"step": 3}, groups=line["groups"])
    assert main([str(run)]) == 1
    assert "step 3, group 0: the steps that consumed the prompt must be [0], got [0, 3]" in capsys.readouterr().out


def test_the_audit_accepts_repeated_uses_of_a_group_up_to_max_uses(run, capsys):
    group = group_of(2, [1, 1, 2, 2], attempt=1)
    again = {"group": 2, "attempt": 1, "tokens": 8, "digest": group.summary.digest, "is_scored": True, "use": 1}
    change(run, Act.planned, {"step": 3}, groups=[again])
    for rank in range(2):
        change(run, Act.trained, {"step": 3, "rank": rank}, groups=trained_on(group, 3, (rank,)))
    summary = json.loads((run / "summary.json").read_text())
    summary["tokens"] |= {"trained": 24, "generated": 29, "reused": 8}
    summary["max_lag"]["histogram"] = {"0": 1, "1": 2, "2": 1}
    (run / "summary.json").write_text(json.dumps(summary))
    assert main([str(run)]) == 1
    assert "step 3, group 2: the steps that consumed the prompt must be [2], got [2, 3]" in capsys.readouterr().out
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("max_uses: 1", "max_uses: 2"))
    assert main([str(run)]) == 0, capsys.readouterr().out
    assert "29 tokens generated, 24 trained, 8 reused" in capsys.readouterr().out
    change(run, Act.planned, {"step": 3}, groups=[again | {"use": 0}])
    assert main([str(run)]) == 1
    assert "the steps that consumed the prompt must be [2], got [2, 3]" in capsys.readouterr().out


def test_the_audit_refuses_a_folder_without_receipts_or_without_an_earlier_life(run, tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "must be the folder of a run, with life.json" in capsys.readouterr().err
    (run.parent / "1").rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    assert main([str(run)]) == 2
    assert "must have a life.json, got none" in capsys.readouterr().err


def test_the_digest_of_tokens_depends_on_each_token_its_order_and_its_owner():
    known = token_digest(3, 1, IDS)
    swapped, other = IDS[[1, 0, 2, 3]], IDS + np.array([0, 0, 0, 1], dtype=np.int32)
    assert len({known, token_digest(3, 1, swapped), token_digest(3, 1, other), token_digest(3, 0, IDS)}) == 4
    assert 0 <= known < 2**receipts.DIGEST_BITS


def test_the_digests_of_all_ranks_sum_to_the_digest_of_the_group():
    group = group_of(7, [2, 2, 3, 3])
    shares = [trained_on(group, 3, (sample,))[0] for sample in range(2)]
    assert sum(share["digest"] for share in shares) % 2**receipts.DIGEST_BITS == group.summary.digest
    assert [share["versions"] for share in shares] == [{"2": 2, "3": 2}] * 2
    assert [share["in_loss"] for share in shares] == [4, 4]
