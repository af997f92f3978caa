"""A training run that is interrupted by random faults and resumed many times.

``pytest -m slow tests/e2e/test_chaos.py`` takes an hour; ``ASYNCRL_CHAOS_S=N`` sets the seconds. The test prints the
seed and its events, and appends them to ``events.log`` in its folder. ``ASYNCRL_FAULT_SEED=N`` repeats the events of
the seed N. With ``ASYNCRL_CHAOS_SGLANG=0.1``, a tenth of the starts use real SGLang servers.
"""

import json
import os
import random
import time
from collections import Counter
from itertools import pairwise

import pytest

from asyncrl.core.receipts import FOLDER
from asyncrl.metrics import read_life
from asyncrl.run.audit import ENGINE_RECEIPT, audit, audited_lives
from asyncrl.run.resume import BUFFER
from asyncrl.run.run_folder import shared_folder
from buffer.exports import read_part
from learner.checkpoint_folder import part_of, read_progress
from tests.e2e.chaos import GROUPS_PER_STEP, Lineage, small_disk
from tests.e2e.run_checks import assert_the_account_closes

DURATION_S = float(os.environ.get("ASYNCRL_CHAOS_S", 3600))
SEED = int(os.environ.get("ASYNCRL_FAULT_SEED", random.randrange(10**6)))
SGLANG_SHARE = float(os.environ.get("ASYNCRL_CHAOS_SGLANG", 0.1))
DISK_MB = 4096
SHORT_SEED, SHORT_S = 16771, 75.0

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(DURATION_S + 1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="the test mounts a small disk, and only root can mount"),
]


@pytest.mark.parametrize(
    ("seed", "duration_s", "sglang_share"),
    [
        pytest.param(SHORT_SEED, SHORT_S, 0.0, id="a_minute"),
        pytest.param(SEED, DURATION_S, SGLANG_SHARE, id="an_hour"),
    ],
)
def test_account_and_prompts_of_a_run_are_correct_after_random_faults_in_many_lives(
    start, tmp_path, seed, duration_s, sglang_share
):
    began_s = time.monotonic()

    def say(words: str) -> None:
        line = f"{time.monotonic() - began_s:7.1f} s  {words}"
        print(line)  # noqa: T201 - pytest shows it when the test fails
        with (tmp_path / "events.log").open("a") as file:
            file.write(line + "\n")

    say(f"ASYNCRL_FAULT_SEED={seed}")
    with small_disk(tmp_path / "disk", DISK_MB) as disk:
        lineage = Lineage(disk=disk, seed=seed, start=start, say=say)
        run = lineage.through(duration_s, sglang_share)
        say(json.dumps({"steps": run.num_steps, **lineage.counts, "tokens": run.summary["tokens"]}))
        say("; ".join(assert_the_lineage_is_right(run, lineage)))


def assert_the_lineage_is_right(run, lineage):
    """Check the audit, account, steps and prompts of a run over all its starts. Check that no shared memory is left.

    Returns the lines in which the audit describes its checks.
    """
    lives = audited_lives(run.run_dir)
    result = audit(lives)
    bad = [one for one in result.bad if not is_lost_on_a_full_disk(one, lineage)]
    assert not bad, "\n".join(map(str, bad[:20]))
    assert_the_account_closes(run.summary)
    unwritten = assert_the_metrics_lack_only_steps_of_killed_lives(run, lives)
    assert [line for line in result.unchecked if not line.startswith("the tokens in the loss of step ")] == []
    assert len(result.unchecked) == len(unwritten)
    for life in lineage.lives:
        assert_steps_rise_by_one_between_rewinds(life)
        assert not shared_folder(life).exists()
    assert_each_prompt_is_finished_once_or_still_there(run, lives, lineage.checkpoint())
    return result.checked


def is_lost_on_a_full_disk(bad, lineage):
    """Return whether a receipt (a record of sampled tokens) is missing because the disk was full.

    If true, the log of a rollout worker says that a ``sampled`` receipt is not written. The log can be from the same
    start of the run or from an earlier start.
    """
    if (bad.what, bad.found) != (ENGINE_RECEIPT, "none"):
        return False
    logs = [path for life in lineage.lives if life <= bad.life for path in life.glob("logs/rollout-*.log")]
    return any("'sampled'> is not written to" in log.read_text(errors="replace") for log in logs)


def assert_the_metrics_lack_only_steps_of_killed_lives(run, lives):
    """Check that the reported steps increase. Returns the steps that ``metrics.jsonl`` lacks.

    If a run is killed and resumed, ``metrics.jsonl`` can lack the last two steps before the first resumed step.
    """
    steps = [record["step"] for record in run.records]
    assert steps == sorted(set(steps))
    unwritten = {*range(run.num_steps)} - {*steps}
    assert unwritten <= {life.record.first_step - back for life in lives for back in (1, 2)}
    return unwritten


def assert_steps_rise_by_one_between_rewinds(life):
    """Check that each committed step has the next number, or a smaller number after a return to a checkpoint."""
    record = read_life(life)
    steps = [line["step"] for line in receipts_of(life) if line["act"] == "committed"]
    if not steps or record is None:
        return
    assert steps[0] == record.first_step
    for before, step in pairwise(steps):
        assert step == before + 1 or record.first_step <= step <= before, f"{life}: step {step} after {before}"


def receipts_of(life):
    """Return the receipts (records of steps) that the controller wrote in one life of the run, possibly none."""
    path = life / FOLDER / "controller.jsonl"
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    return map(json.loads, whole.splitlines())


def assert_each_prompt_is_finished_once_or_still_there(run, lives, checkpoint):
    """Check that each prompt was trained once, was dropped for a known reason, or is in ``checkpoint``."""
    consumed = consumed_groups(lives)
    assert max(Counter(consumed).values()) == 1
    assert len(consumed) == GROUPS_PER_STEP * run.num_steps
    contents = read_part(part_of(checkpoint, BUFFER))
    there = {group.prompt.group_id for group in contents.groups}
    missing = {*range(max(consumed) + 1)} - {*consumed} - there
    assert len(missing) == sum(contents.groups_dropped.values()), f"{sorted(missing)[:20]} {contents.groups_dropped}"
    assert read_progress(checkpoint).version == run.num_steps


def consumed_groups(lives):
    """Return the ids of the groups that the steps of a run consumed.

    If a step was planned several times, the result includes only the latest plan. If the run was resumed from a
    checkpoint, the result excludes the lost steps after this checkpoint.
    """
    by_step = {}
    for life in lives:
        by_step = {step: groups for step, groups in by_step.items() if step < life.record.first_step}
        for line in receipts_of(life.folder):
            if line["act"] == "planned":
                by_step = {step: groups for step, groups in by_step.items() if step < line["step"]}
                by_step[line["step"]] = [group["group"] for group in line["groups"]]
    return [group for groups in by_step.values() for group in groups]
