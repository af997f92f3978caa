"""The methods of a learner worker on one rank and on two ranks, with a scripted buffer and without Ray."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.core.errors import BatchLost, DeadlineError, StalenessError, UnknownGroup
from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import FinishReason, WeightOffer
from asyncrl.weights.manifest import read_manifest
from learner.config import AlgorithmConfig, Device, LearnerConfig, OptimizerConfig
from learner.trajectory_log import SCHEMA, TokenLogOptions, TrajectoryLog
from learner.types import GroupShare, RankBatch
from learner.verl_api import ActorWorker
from learner.worker import PER_DP_RANK
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCABULARY, save_tiny_model
from tests.support.trajectories import make_group

TEMPERATURE = 0.8


def group(group_id: int, oldest_version: int = 5) -> TrajectoryGroup:
    rng = np.random.default_rng(group_id)
    lengths = np.array([3, 5], dtype=np.int32)
    return make_group(
        group_id=group_id,
        attempt=0,
        prompt_ids=rng.integers(0, VOCABULARY, 4).astype(np.int32),
        response_ids=rng.integers(0, VOCABULARY, 8).astype(np.int32),
        response_lengths=lengths,
        response_mask=np.ones(8, dtype=bool),
        logprobs=np.full(8, -3.0, dtype=np.float32),
        versions=np.array([oldest_version] * 3 + [7] * 5, dtype=np.int32),
        rewards=np.array([1.0, 0.0], dtype=np.float32),
        finish_reasons=(FinishReason.stop, FinishReason.length),
    )


class ScriptedBuffer:
    """A buffer that serves batches and stores the offers of weights."""

    offers: ClassVar[list[WeightOffer]] = []

    def offer(self, offer: WeightOffer) -> int:
        self.offers.append(offer)
        return 0

    def publish_failed(self, reason: str) -> None:
        raise AssertionError(reason)

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        return [group(group_id) for group_id in group_ids]

    def close(self) -> None:
        pass


def batch(group_ids: Sequence[int], max_lag: int = 2) -> RankBatch:
    rewards = np.array([1.0, 0.0], dtype=np.float32)
    shares = [GroupShare(group_id=i, samples=(0, 1), rewards=rewards, mini_batch=0) for i in group_ids]
    return RankBatch(version=7, shares=tuple(shares), max_lag=max_lag)


def start(directory: str, num_ranks: int, *, connect_buffer: Any = ScriptedBuffer, **options: Any) -> ActorWorker:
    if num_ranks == 1:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    worker = ActorWorker(
        LearnerConfig(num_ranks=num_ranks, device=Device.cpu, optimizer=OptimizerConfig(lr=1e-2), **options),
        AlgorithmConfig(groups_per_step=2, samples_per_prompt=2),
        model_path=f"{directory}/model",
        total_steps=10,
        temperature=TEMPERATURE,
        connect_buffer=connect_buffer,
        snapshot_dir=f"{directory}/snapshots{num_ranks}",
        seed=0,
        trajectory_dir=f"{directory}/trajectories{num_ranks}",
        token_log=TokenLogOptions(directory=f"{directory}/tokens{num_ranks}", every_steps=7, num_sequences=3),
    )
    worker.init_model()
    return worker


def published(worker: ActorWorker, version: int) -> str:
    """Publish weights. Returns the folder of the published weights, or an empty string on ranks without an offer."""
    ScriptedBuffer.offers.clear()
    worker.publish_weights(version)
    worker.finish_publish()
    return read_manifest(ScriptedBuffer.offers[0]).directory if ScriptedBuffer.offers else ""


def one_step(directory: str, num_ranks: int) -> tuple[dict[str, float], str]:
    worker = start(directory, num_ranks)
    shards = [batch([1, 2])] if num_ranks == 1 else [batch([2]), batch([1])]
    (parts,), _ = PER_DP_RANK["dispatch_fn"](SimpleNamespace(world_size=num_ranks), shards)
    metrics = worker.step(parts[int(os.environ["RANK"])])
    return metrics, published(worker, 8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("run")
    save_tiny_model(path / "model")
    return str(path)


@pytest.fixture(scope="module")
def outcomes(directory: str) -> list[tuple[dict[str, float], str]]:
    """Return the metrics of one step on two ranks, and the folder of the published weights."""
    return run_on_ranks(2, one_step, directory, 2)


def test_two_ranks_make_the_same_step_as_one(directory, outcomes):
    alone, path = one_step(directory, 1)
    for metrics, _ in outcomes:
        for name in ("loss", "grad_norm", "entropy", "ratio", "behavior_kl", "clip_fraction", "num_tokens", "lr"):
            assert metrics[name] == pytest.approx(alone[name], rel=1e-4), name
        assert metrics["ended_at"] >= metrics["started_at"] + metrics["train_s"]
    assert alone["num_tokens"] == 16
    assert alone["lag_max"] == 2
    one, two = (load_file(f"{where}/model.safetensors") for where in (path, outcomes[0][1]))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-4)


def test_the_trajectory_record_has_the_lags_rewards_and_advantages_of_the_step(directory):
    one_step(directory, 1)
    table = pq.read_table(f"{directory}/trajectories1/step_00000007_rank0.parquet").to_pylist()
    assert [(row["group_id"], row["lag"], row["reward"]) for row in table] == [
        (1, 2, 1),
        (1, 0, 0),
        (2, 2, 1),
        (2, 0, 0),
    ]
    assert table[1]["response_ids"] == group(1).token_ids[len(group(1).prompt_ids) :][3:].tolist()
    assert table[1]["versions"] == [7] * 5
    assert table[1]["advantage"] == pytest.approx(-(0.5**0.5))


@pytest.mark.usefixtures("outcomes")
def test_the_token_log_has_the_log_probs_of_one_rank_before_the_update(directory):
    (file,) = Path(directory, "tokens2").iterdir()
    rows = pq.read_table(file).to_pylist()
    assert [(row["group_id"], len(row["response_ids"])) for row in rows] == [(2, 3), (2, 5)]
    model = AutoModelForCausalLM.from_pretrained(f"{directory}/model")
    for row in rows:
        tokens = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        log_probs = torch.log_softmax(model(tokens).logits[0, :-1].float() / TEMPERATURE, dim=-1)
        own = log_probs.gather(1, tokens[0, 1:, None])[-len(row["response_ids"]) :, 0]
        torch.testing.assert_close(torch.tensor(row["learner_logprobs"]), own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_batch_with_a_group_outside_the_lag_bound_is_refused(directory, max_lag):
    worker = start(directory, 1)
    with pytest.raises(StalenessError, match=rf"group 3 has lag 2 at learner version 7, outside 0\.\.{max_lag}"):
        worker.step(batch([3], max_lag=max_lag))


class ForgetfulBuffer(ScriptedBuffer):
    """A buffer without the groups in ``lost``. Each entry of ``is_late`` makes one call of `fetch` time out."""

    lost: ClassVar[set[int]] = set()
    is_late: ClassVar[list[bool]] = []

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        if self.is_late:
            self.is_late.pop()
            raise DeadlineError("the store did not answer")
        if gone := self.lost.intersection(group_ids):
            raise UnknownGroup(f"{gone} are not stored")
        return super().fetch(group_ids)


def a_lost_batch(directory: str) -> tuple[list[int], float, float]:
    """Make a step whose batch one rank cannot fetch, then a step on another batch.

    Returns three values: the ids of the lost groups, and the norms of the weights before and after the steps.
    """
    rank = int(os.environ["RANK"])
    ForgetfulBuffer.lost, ForgetfulBuffer.is_late[:] = {1, 2}, [True]
    worker = start(directory, 2, connect_buffer=ForgetfulBuffer)
    published(worker, 7)
    before = weights_norm(worker)
    with pytest.raises(BatchLost, match=r"step 7 is lost: rank \d of 'actor' .* \d of its"):
        worker.step([batch([1, 2, 3]), batch([4])][rank])
    assert weights_norm(worker) == before
    for queued in (partial(worker.publish_weights, 8), partial(worker.step, replace(batch([3]), version=8))):
        with pytest.raises(BatchLost, match=r"'actor' is at version 7 .* version 8"):
            queued()
    with pytest.raises(BatchLost):
        worker.save_checkpoint(f"{directory}/never", 8)
    lost = worker.forget_batch()
    assert worker.forget_batch() == []
    worker.step([batch([3]), batch([4])][rank])
    published(worker, 8)
    return lost, before, weights_norm(worker)


def two_steps(directory: str, num_ranks: int, sp_size: int, announces: bool) -> tuple[list[Any], bytes]:
    """Make two steps. Returns the metrics of both steps, and the final weights.

    Checks that the groups of the second step were fetched in advance.
    """
    fetched: list[int] = []

    class Buffer(ScriptedBuffer):
        def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
            fetched.extend(group_ids)
            return super().fetch(group_ids)

    worker = start(directory, num_ranks, connect_buffer=Buffer, sp_size=sp_size)
    share, sp_rank = divmod(int(os.environ["RANK"]), sp_size)
    first = [batch([1, 2, 3]), batch([4])][share]
    second = replace([batch([5]), batch([2, 6, 7])][share], version=8, max_lag=3)
    if announces:
        worker.announce(first)
        worker.announce(second)
    metrics = [worker.step(first)]
    if announces:
        expected, until_s = set(first.group_ids + second.group_ids) if sp_rank == 0 else set(), time.monotonic() + 30
        while set(fetched) != expected and time.monotonic() < until_s:
            time.sleep(0.01)
        assert set(fetched) == expected
    metrics.append(worker.step(second))
    published(worker, 9)
    losses = [[step[name] for name in ("loss", "grad_norm", "entropy", "num_micro_batches")] for step in metrics]
    whole = (parameter.detach().full_tensor() for parameter in worker.model.head.parameters())
    weights = b"".join(values.numpy().tobytes() for values in whole)
    return losses, weights


@pytest.mark.long
@pytest.mark.parametrize("sp_size", [1, 2])
def test_steps_on_batches_prepared_in_advance_are_bit_for_bit_the_same(directory, sp_size):
    ahead = run_on_ranks(2, two_steps, directory, 2, sp_size, True)
    assert ahead == run_on_ranks(2, two_steps, directory, 2, sp_size, False)


def a_lost_batch_that_was_announced(directory: str) -> tuple[list[int], list[str]]:
    """Announce two steps. One rank cannot fetch the groups of the second step.

    Returns the ids of the lost groups, and the raised errors.
    """
    rank, raised = int(os.environ["RANK"]), []
    ForgetfulBuffer.lost, ForgetfulBuffer.is_late[:] = {5}, []
    worker = start(directory, 2, connect_buffer=ForgetfulBuffer)
    first, second = batch([1 + rank]), replace(batch([3, 5] if rank else [4]), version=8, max_lag=3)
    third = replace(batch([6 + rank]), version=9, max_lag=4)
    for announced in (first, second, third):
        worker.announce(announced)
    worker.step(first)
    for queued in (second, third):
        try:
            worker.step(queued)
        except BatchLost as lost:
            raised.append(str(lost))
    lost = worker.forget_batch()
    again = replace(batch([3 if rank else 4]), version=8, max_lag=3)
    for announced in (again, third):
        worker.announce(announced)
    worker.step(again)
    worker.step(third)
    return lost, raised


def test_a_lost_announced_batch_fails_in_its_own_step_and_can_be_planned_again(directory):
    (none, first), (lost, second) = run_on_ranks(2, a_lost_batch_that_was_announced, directory)
    assert (none, lost) == ([], [5])
    for step, skipped in (first, second):
        assert "the batch of step 8 is lost" in step
        assert "'actor' is at version 8 and skips a call for version 9" in skipped


def weights_norm(worker: ActorWorker) -> float:
    return sum(float(parameter.full_tensor().norm()) for parameter in worker.model.head.parameters())


def test_a_batch_that_one_rank_loses_updates_no_rank_and_can_be_planned_again(directory):
    (lost, before, after), (other, _, _) = run_on_ranks(2, a_lost_batch, directory)
    assert (lost, other) == ([1, 2], [])
    assert after != before


def test_a_saved_policy_equals_the_published_policy(directory, tmp_path):
    worker = start(directory, 1)
    worker.step(batch([1, 2]))
    worker.save_policy(str(tmp_path / "policy"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    offered = AutoModelForCausalLM.from_pretrained(published(worker, 8)).state_dict()
    original = AutoModelForCausalLM.from_pretrained(f"{directory}/model").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in offered.items())
    assert not torch.equal(saved["lm_head.weight"], original["lm_head.weight"])


def test_a_resumed_worker_makes_the_same_next_step(directory, tmp_path):
    worker = start(directory, 1)
    worker.step(batch([1]))
    worker.save_checkpoint(str(tmp_path), 8, wait=False)
    expected = worker.step(batch([2]))
    resumed = start(directory, 1)
    assert resumed.load_checkpoint(str(tmp_path / "none")) is None
    worker.stop()
    resumed = start(directory, 1)
    assert resumed.load_checkpoint(str(tmp_path)) == 8
    got = resumed.step(batch([2]))
    assert (got["loss"], got["grad_norm"], got["lr"]) == (expected["loss"], expected["grad_norm"], expected["lr"])


def test_rollout_mode_offloads_the_learner_and_trainer_mode_loads_it(directory):
    worker = start(directory, 1, offload_at_transition_only=True)
    worker.step(batch([1]))
    ScriptedBuffer.offers.clear()
    worker.rollout_mode(8)
    [offer] = ScriptedBuffer.offers
    assert (worker._actor_model_offloaded, worker._actor_optimizer_offloaded) == (True, True)
    assert "model.embed_tokens.weight" in load_file(f"{read_manifest(offer).directory}/model.safetensors")
    worker.trainer_mode()
    assert (worker.offload.model_offloaded, worker.offload.optimizer_offloaded) == (False, False)
    metrics = worker.step(batch([2]))
    assert metrics["rollout_device_bytes_before"] > 0
    assert metrics["rollout_device_bytes_after"] == 0


def slow_offload(directory: str) -> dict[str, float]:
    """Let rank 1 offload slowly. Returns when this rank had offloaded, and on rank 0 when it offered the version."""
    times: dict[str, float] = {}

    class Buffer(ScriptedBuffer):
        def offer(self, offer: WeightOffer) -> int:
            times["offered"] = time.time()
            return super().offer(offer)

    worker = start(directory, 2, connect_buffer=Buffer, offload_at_transition_only=True)
    offload = worker.offload.enter_rollout

    def offload_slowly() -> None:
        time.sleep(1.0 if worker.rank else 0.0)
        offload()
        times["offloaded"] = time.time()

    worker.offload.enter_rollout = offload_slowly
    worker.rollout_mode(8)
    return times


def test_every_rank_offloads_before_the_weights_are_offered_to_engines(directory):
    first, second = run_on_ranks(2, slow_offload, directory)
    assert first["offloaded"] < second["offloaded"] < first["offered"]


def test_every_rank_of_an_sp_group_gets_the_shard_of_its_group():
    shards: list[Any] = ["first", "second"]
    (parts,), kwargs = PER_DP_RANK["dispatch_fn"](SimpleNamespace(world_size=4), shards)
    assert (parts, kwargs) == (["first", "first", "second", "second"], {})
    with pytest.raises(ValueError, match=r"got \[2\] entries for 3 ranks"):
        PER_DP_RANK["dispatch_fn"](SimpleNamespace(world_size=3), shards)


def test_an_incomplete_log_file_is_not_visible(tmp_path, monkeypatch):
    log, batch = TrajectoryLog(str(tmp_path)), RankBatch(version=7, shares=(), max_lag=1)
    whole = log.write(batch, {}, [], rank=0)
    assert pq.read_schema(whole) == SCHEMA

    def torn(table, path):
        path.write_bytes(b"PAR1")
        raise OSError("killed")

    monkeypatch.setattr(pq, "write_table", torn)
    for rank in (0, 1):
        with pytest.raises(OSError, match="killed"):
            log.write(batch, {}, [], rank=rank)
    assert list(tmp_path.glob("*.parquet")) == [whole]
    assert pq.read_schema(whole) == SCHEMA
