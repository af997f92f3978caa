"""The list of runs, with the starts and the checkpoints of each run."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from asyncrl.cli.compose import compose_run, dump_yaml
from asyncrl.cli.runs_command import main, size
from asyncrl.metrics import read_life
from asyncrl.run.run_folder import hold_shared_folder, shared_folder
from asyncrl.run.run_lives import begin_life, end_life, find_runs
from learner.checkpoint_folder import keep_newest, whole_checkpoints
from tests.support.checkpoints import save


def make_life(folder: Path, *, resumed: Path | None = None, steps: int = 0, status: int | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(compose_run(["total_steps=50"])))
    begin_life(folder, resumed)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(steps)))
    if status is not None:
        end_life(folder, status)
    return folder


@pytest.fixture
def runs(tmp_path):
    """Make a run that was started three times and still runs, and a failed run. Yields the folder of the two runs."""
    first = make_life(tmp_path / "digits" / "1", steps=12, status=143)
    save(first / "checkpoints", 10)
    newest = save(first / "checkpoints", 12)
    make_life(tmp_path / "sums" / "1", steps=1, status=1)
    second = make_life(tmp_path / "digits" / "2", resumed=newest, steps=30)
    third = make_life(tmp_path / "digits" / "3", resumed=save(second / "checkpoints", 24, parts=["critic"]), steps=31)
    lock = hold_shared_folder(third)
    yield tmp_path
    assert lock is not None
    shutil.rmtree(shared_folder(third))


def test_consecutive_lives_are_listed_as_one_run_with_their_states(runs):
    failed, digits = sorted(find_runs(runs)[0], key=len)
    assert [(life.folder.name, str(life.state), life.num_steps) for life in digits] == [
        ("1", "stopped", 12),
        ("2", "killed", 30),
        ("3", "running", 31),
    ]
    assert [one.version for one in digits[0].checkpoints] == [10, 12]
    assert digits[1].checkpoints[0].missing == ["critic"]
    assert digits[1].record.resumed == str(digits[0].checkpoints[1].path)
    assert [str(life.state) for life in failed] == ["failed"]
    assert digits[0].num_bytes > sum(one.num_bytes for one in digits[0].checkpoints) > 0


def test_a_life_with_an_unknown_value_is_refused_by_name(tmp_path):
    folder = make_life(tmp_path / "1")
    values = json.loads((folder / "life.json").read_text())
    (folder / "life.json").write_text(json.dumps(values | {"color": "red"}))
    with pytest.raises(
        ValueError, match=r"1/life\.json must hold only host, .* got also color; read the file with the version"
    ):
        read_life(folder)


def test_the_command_prints_runs_lives_and_checkpoints(runs, capsys):
    assert main([str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{runs}/digits/1 (3 lives)"
    assert lines[1].startswith("  1  stopped, 12 of 50 steps, ")
    assert lines[2].startswith(f"    {runs}/digits/1/checkpoints/v00000010  ")
    assert lines[4].endswith(f", continues {runs}/digits/1/checkpoints/v00000012")
    assert lines[5].endswith(", incomplete: without critic")
    assert lines[-1] == f"2 runs in {runs}"
    assert main([str(runs), "--json"]) == 0
    assert [len(run) for run in json.loads(capsys.readouterr().out)] == [3, 1]


def test_runs_are_listed_while_a_training_saves_and_removes_checkpoints(tmp_path):
    checkpoints = make_life(tmp_path / "digits" / "1", steps=1) / "checkpoints"
    has_listed = threading.Event()

    def train():
        for version in range(100_000):
            if has_listed.is_set():
                return
            (checkpoints / "buffer" / f"v{version:08d}").mkdir(parents=True)
            written = save(tmp_path / "partial", version, parts=["buffer"])
            keep_newest(written.rename(checkpoints / written.name), 2)

    training = threading.Thread(target=train)
    training.start()
    try:
        for _ in range(25):
            ((life,),), damaged = find_runs(tmp_path)
            assert not damaged
            assert [one.missing for one in life.checkpoints if one.missing] == []
            whole_checkpoints(checkpoints)
    finally:
        has_listed.set()
        training.join()


@pytest.mark.parametrize(
    ("file", "message"), [("metrics.jsonl", "the last line of {}"), ("life.json", "{}"), ("config.yaml", "{}")]
)
def test_a_damaged_file_of_a_run_is_named(runs, capsys, file, message):
    damaged = runs / "digits" / "2" / file
    damaged.write_text("{[\n")
    assert main([str(runs)]) == 2
    printed = capsys.readouterr()
    assert f"error: {message.format(damaged)} must hold" in printed.err
    assert str(runs / "digits" / "1") in printed.out, "the other runs must be listed"


def test_a_folder_without_runs_gives_an_empty_list_and_a_missing_folder_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"0 runs in {tmp_path}\n"
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "must be a folder with runs" in capsys.readouterr().err


@pytest.mark.parametrize(("num_bytes", "words"), [(0, "0 B"), (999, "999 B"), (1_234_567, "1.23 MB")])
def test_a_size_has_three_digits_and_a_unit(num_bytes, words):
    assert size(num_bytes) == words
