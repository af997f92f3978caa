"""A resumed run continues the metrics from before its last stop."""

import json
from types import SimpleNamespace

import pytest

from asyncrl.metrics import Estimate, Evaluation, MetricsWriter, Trackers, history_folder, read_history
from tests.asyncrl.test_metrics import make_record

EVALUATIONS = [
    Evaluation(
        policy_version=version,
        sampled=0.25,
        greedy=0.5,
        num_prompts=4,
        incomplete={"1": "it left"},
        estimates={"mean@4": Estimate(mean=0.25, low=0.1, high=0.4)},
        by_source={"sums": {"greedy": Estimate(mean=0.5, low=0.2, high=0.8)}},
    )
    for version in (0, 2, 3)
]


@pytest.fixture
def life(tmp_path):
    """Return a run folder with five steps and three evaluations. The last line of ``metrics.jsonl`` is incomplete."""
    folder = tmp_path / "first"
    folder.mkdir()
    writer = MetricsWriter(folder)
    writer.go_on([make_record(step) for step in range(5)], EVALUATIONS)
    writer.close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    return folder


def test_a_resumed_run_continues_the_recorded_history_in_its_new_folder(life, tmp_path):
    history = read_history(life, 3)
    assert history.steps == [make_record(step) for step in range(3)]
    assert history.evaluations == EVALUATIONS[:2], "the resumed run must evaluate version 3 itself"
    second = tmp_path / "second"
    second.mkdir()
    writer = MetricsWriter(second)
    writer.go_on(history.steps, history.evaluations)
    writer.write(make_record(3))
    writer.evaluation(EVALUATIONS[2])
    writer.close()
    lines = (life / "metrics.jsonl").read_text().splitlines()
    assert (second / "metrics.jsonl").read_text().splitlines() == lines[:4]
    assert (second / "evaluations.jsonl").read_text() == (life / "evaluations.jsonl").read_text()


def test_missing_or_invalid_metrics_are_named(life, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere/metrics\.jsonl must hold the steps before the checkpoint"):
        read_history(tmp_path / "nowhere", 3)
    (life / "metrics.jsonl").write_text(json.dumps({"stepp": 0}) + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .*metrics\.jsonl must hold a JSON object with step"):
        read_history(life, 3)


@pytest.mark.parametrize("file", ["metrics.jsonl", "evaluations.jsonl"])
def test_a_record_of_another_asyncrl_version_is_named(life, file):
    record = json.loads((life / file).read_text().splitlines()[1])
    del record["reward_std" if file == "metrics.jsonl" else "num_prompts"]
    (life / file).write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=rf"line 1 of .*{file} must be a record of this version.*missing 1 required"):
        read_history(life, 3)


def test_the_history_is_next_to_the_checkpoint_or_in_the_recorded_folder(life, tmp_path):
    assert history_folder(life / "checkpoints" / "v00000003", "/elsewhere") == life
    assert history_folder(tmp_path / "shared" / "v00000003", str(life)) == life


def test_trackers_receive_the_history_separately_from_new_events():
    received = []
    trackers = Trackers({"one": SimpleNamespace(place="", go_on=received.append)})
    trackers.go_on([make_record(0), EVALUATIONS[0]])
    assert received == [make_record(0), EVALUATIONS[0]]
    assert trackers.num_failed == {"one": 0}
