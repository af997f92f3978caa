"""The log of decoded samples: the choice of samples, and the columns of the files."""

import logging

import numpy as np
import pyarrow.parquet as pq

from asyncrl.core.types import FinishReason, Prompt
from rollout_fleet.config import SamplesConfig
from rollout_fleet.engines.engine import SampleOutput
from rollout_fleet.rewards import Scores
from rollout_fleet.sample_log import SampleLog


def log_in(folder, **options):
    return SampleLog(folder, rank=1, config=SamplesConfig(**options), decode=lambda ids: " ".join(map(str, ids)))


def group(group_id, *versions):
    prompt = Prompt(group_id=group_id, prompt_ids=np.asarray([3, 4], dtype=np.int32), ground_truth={"answer": 7})
    samples = [
        SampleOutput(
            token_ids=np.arange(len(written), dtype=np.int32),
            logprobs=np.zeros(len(written), dtype=np.float32),
            versions=np.asarray(written, dtype=np.int32),
            finish_reason=FinishReason.stop,
        )
        for written in versions
    ]
    rewards = np.linspace(0, 1, len(samples), dtype=np.float32)
    parts = {"format": rewards / 2}
    return prompt, samples, [f"text {index}" for index in range(len(samples))], Scores(total=rewards, parts=parts)


async def test_the_sample_log_stores_the_first_groups_of_each_interval_with_their_rewards(tmp_path):
    log = log_in(tmp_path / "samples", every_steps=10, num_groups=2)
    for group_id, version in enumerate((0, 1, 2, 9, 12, 13, 19, 20)):
        await log.add(*group(group_id, [version], [max(0, version - 1), version]))
    files = sorted((tmp_path / "samples").iterdir())
    assert [file.name for file in files] == ["train-v00000001-rollout1.parquet", "train-v00000013-rollout1.parquet"]
    rows = pq.read_table(files[1]).to_pylist()
    assert [row["group_id"] for row in rows] == [4, 4, 5, 5]
    assert rows[3] == {
        "kind": "train", "version": 13, "group_id": 5, "data_source": "", "prompt": "3 4",
        "ground_truth": '{"answer": 7}', "response": "text 1", "reward": 1.0, "rewards": '{"format": 0.5}',
        "num_tokens": 2, "finish_reason": "stop", "oldest_version": 12, "newest_version": 13,
        "episode": "",
    }  # fmt: skip


async def test_the_sample_log_stores_no_training_samples_if_it_is_switched_off(tmp_path):
    log = log_in(tmp_path / "samples", every_steps=0)
    await log.add(*group(0, [0]))
    assert not (tmp_path / "samples").exists()


async def test_the_sample_log_stores_invalid_unicode_with_replacement_characters(tmp_path):
    log = log_in(tmp_path, num_groups=1)
    prompt, samples, _, scores = group(0, [0])
    await log.add(prompt, samples, ["a\ud800b"], scores)
    (file,) = tmp_path.iterdir()
    assert pq.read_table(file).to_pylist()[0]["response"] == "a?b"


async def test_a_sample_file_that_cannot_be_written_causes_only_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    log = log_in(tmp_path / "file", num_groups=1)
    with caplog.at_level(logging.WARNING):
        await log.add(*group(0, [0]))
    assert "samples are not saved" in caplog.text
