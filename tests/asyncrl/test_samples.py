"""``asyncrl samples``: the saved samples of a run, in the requested order and form."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl import samples


def keep(run_dir, kind, version, *rewards, rank=0, episodes=()):
    rows = [
        {
            "kind": kind, "version": version, "group_id": index, "data_source": "", "prompt": f"{index}=",
            "ground_truth": "7", "response": f"{kind} {version} {index}", "reward": reward, "rewards": "{}",
            "num_tokens": 3 + index, "finish_reason": "stop", "oldest_version": version - 1, "newest_version": version,
            **({"episode": json.dumps(episodes[index])} if episodes else {}),
        }
        for index, reward in enumerate(rewards)
    ]  # fmt: skip
    (run_dir / "samples").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), run_dir / "samples" / f"{kind}-v{version:08d}-rollout{rank}.parquet")


@pytest.fixture
def run_dir(tmp_path):
    run_dir = tmp_path / "experiment" / "2026-01-02"
    keep(run_dir, "train", 1, 0.5, 1.0)
    keep(run_dir, "train", 11, 0.25)
    keep(run_dir, "greedy", 0, 0.75)
    keep(run_dir.with_name("2026-01-01"), "train", 1, 0.0)
    return run_dir


@pytest.mark.parametrize(
    ("options", "responses"),
    [
        ([], ["train 11 0", "train 1 0", "train 1 1", "greedy 0 0"]),
        (["--kind", "greedy"], ["greedy 0 0"]),
        (["--version", "1"], ["train 1 0", "train 1 1"]),
        (["--order", "worst", "-n", "2"], ["train 11 0", "train 1 0"]),
        (["--order", "best", "-n", "1"], ["train 1 1"]),
        (["--order", "longest", "-n", "1"], ["train 1 1"]),
        (["--contains", "11"], ["train 11 0"]),
    ],
)
def test_samples_are_selected_and_ordered_by_the_options(run_dir, capsys, options, responses):
    assert samples.main([str(run_dir), *options]) == 0
    shown = capsys.readouterr().out
    assert [line.split(maxsplit=1)[1] for line in shown.splitlines() if line.startswith("response")] == responses


def test_samples_shows_complete_samples_of_the_newest_run(run_dir, capsys):
    assert samples.main([str(run_dir.parent), "--order", "best", "-n", "1"]) == 0
    assert capsys.readouterr().out == (
        "── train sample of group 1, versions 0 to 1, reward 1.000, 4 tokens, stop ──\n"
        "prompt       1=\nresponse     train 1 1\nground truth 7\n\n"
    )


def test_a_negative_number_of_samples_is_refused(run_dir, capsys):
    with pytest.raises(SystemExit):
        samples.main([str(run_dir), "-n", "-1"])
    assert "-n must be >= 0, got -1; 0 shows all samples" in capsys.readouterr().err


def test_a_folder_without_samples_is_refused(tmp_path, capsys):
    for folder, problem in ((tmp_path, "set rollout_fleet.samples.every_steps"), (tmp_path / "none", "does not exist")):
        assert samples.main([str(folder)]) == 2
        assert problem in capsys.readouterr().err


def test_new_samples_are_the_worst_and_the_best(run_dir):
    new = samples.NewSamples(run_dir)
    assert [sample["reward"] for sample in new.extremes(2)] == [0.25, 1.0]
    assert new.extremes(2) == []
    keep(run_dir, "train", 21, 0.5, 0.0, 0.75)
    assert [sample["reward"] for sample in new.extremes(3)] == [0.0, 0.5, 0.75]
    keep(run_dir, "train", 31, 0.5, 0.0)
    assert [sample["reward"] for sample in new.extremes(1)] == [0.0]
    line = samples.sample_line({**samples.read_samples(sorted((run_dir / "samples").iterdir()))[0], "prompt": "x" * 90})
    assert line.endswith(f": {'x' * 35 + ' … ' + 'x' * 35!r} -> 'greedy 0 0'")


def test_a_truncated_sample_file_is_named(tmp_path, capsys):
    keep(tmp_path, "train", 3, 0.5)
    (torn,) = tmp_path.glob("samples/*.parquet")
    torn.write_bytes(torn.read_bytes()[:-9])
    assert samples.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {torn} must be a whole parquet file, got ")


def test_control_characters_of_a_sample_do_not_reach_the_terminal(tmp_path, capsys):
    keep(tmp_path, "train", 3, 0.5)
    (file,) = tmp_path.glob("samples/*.parquet")
    [row] = pq.read_table(file).to_pylist()
    hostile = "\x1b]52;c;ZXZpbA==\x07 \x9b2J \r \x08 \u202e naïve\t数学 \U0001f468\u200d\U0001f469\nend"
    pq.write_table(pa.Table.from_pylist([row | {"response": hostile, "prompt": "\x1b[31m"}]), file)
    assert samples.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert not [character for character in shown if ord(character) < 32 and character not in "\n\t"]
    assert not set("\x7f\x9b\u202e") & set(shown)
    assert r"\x1b]52;c;ZXZpbA==\x07 \x9b2J \r \x08 \u202e naïve" in shown
    assert "\t数学 \U0001f468\u200d\U0001f469\nend" in shown
