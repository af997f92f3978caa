"""Critic, reference and reward model run in the actor's processes. A role's own options do not change its results."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from asyncrl.core.errors import BatchLost, UnknownGroup
from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import FinishReason, Plan
from asyncrl.single_controller import Worker
from learner.batching import rank_batches
from learner.config import (
    ROLE_SECTIONS,
    AlgorithmConfig,
    AttentionKernel,
    CriticConfig,
    Device,
    Dtype,
    LearnerConfig,
    OptimizerConfig,
    ReferenceConfig,
    Resharding,
    RewardModelConfig,
)
from learner.trainer import Trainer
from learner.types import RankBatch, SampleKey
from learner.verl_api import ActorWorker, CriticWorker, ReferenceWorker, RewardModelWorker
from learner.worker import ModelWorker
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCABULARY, save_tiny_model
from tests.support.trajectories import make_group

pytestmark = pytest.mark.long

ALGORITHM = AlgorithmConfig(advantage="gae", groups_per_step=5, samples_per_prompt=2, kl_coef=0.05, kl_reward_coef=0.1)
BASE = LearnerConfig(
    num_ranks=2,
    device=Device.cpu,
    optimizer=OptimizerConfig(lr=1e-2, eps=1e-4),
    critic=CriticConfig(optimizer=OptimizerConfig(lr=1e-2, eps=1e-4)),
    skip_selftest="test_selftest.py tests it",
)
WORKERS = {"rm": RewardModelWorker, "ref": ReferenceWorker, "critic": CriticWorker, "actor": ActorWorker}
NUM_GROUPS = 5


def group(group_id: int) -> TrajectoryGroup:
    """Return a group whose samples have very different lengths.

    The lengths decide which data-parallel rank gets which samples. So with two ranks, the samples of a rank are not the
    samples that two of four ranks would get.
    """
    rng = np.random.default_rng(group_id)
    lengths = np.array([2 + 3 * group_id, 4], dtype=np.int32)
    count = int(lengths.sum())
    return make_group(
        group_id=group_id,
        attempt=0,
        prompt_ids=rng.integers(0, VOCABULARY, 3 + group_id).astype(np.int32),
        response_ids=rng.integers(0, VOCABULARY, count).astype(np.int32),
        response_lengths=lengths,
        response_mask=np.ones(count, dtype=bool),
        logprobs=-rng.uniform(1.0, 4.0, count).astype(np.float32),
        versions=np.zeros(count, dtype=np.int32),
        rewards=rng.random(2).astype(np.float32),
        finish_reasons=(FinishReason.stop, FinishReason.length),
    )


class Buffer:
    """A buffer that has every group, except the groups in ``lost``."""

    lost: ClassVar[set[int]] = set()

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        if gone := self.lost.intersection(group_ids):
            raise UnknownGroup(f"{gone} are not stored")
        return [group(group_id) for group_id in group_ids]

    def close(self) -> None:
        pass


class Process:
    """The learner roles of one process. The methods call the roles in the same way as a run."""

    def __init__(
        self, directory: str, config: LearnerConfig, roles: Sequence[str], algorithm: AlgorithmConfig = ALGORITHM
    ) -> None:
        self._rank, self._config = int(os.environ["RANK"]), config
        self.roles: dict[str, ModelWorker] = {}
        for role in roles:
            options: dict[str, Any] = {"connect_buffer": Buffer, "model_path": f"{directory}/{role}", "total_steps": 4}
            self.roles[role] = WORKERS[role](config, algorithm, **options)
        for worker in self.roles.values():
            setattr(worker, Worker.fused_worker_attr_name, self.roles)
            worker.init_model()

    def batch(self, role: str, version: int = 0) -> RankBatch:
        """Return the part of the plan (the groups of a step) that this process computes for a role."""
        sp_size = self._config.of_role(role).sp_size
        plan = Plan(version=version, groups=[group(index).summary for index in range(NUM_GROUPS)])
        num_shards = self._config.num_ranks // sp_size
        return rank_batches(plan, ALGORITHM, num_shards=num_shards, max_lag=1)[self._rank // sp_size]

    def scores(self, role: str) -> dict[SampleKey, np.ndarray]:
        """Return the scores that a role computes for this process's batch: none, except on the first sp rank."""
        rows = self.roles[role].score(self.batch(role))
        if rows is None:
            return {}
        arrays = rows.non_tensor_batch
        keys = map(tuple, arrays["sample_key"].tolist())
        return dict(zip(keys, arrays[self.roles[role].role.column], strict=True))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models")
    for role in ("actor", "ref"):
        causal = save_tiny_model(path / role)
    for role, kind in (("critic", AutoModelForTokenClassification), ("rm", AutoModelForSequenceClassification)):
        torch.manual_seed(2)
        model = kind.from_pretrained(causal, num_labels=1)
        torch.nn.init.normal_(model.score.weight, std=0.1)
        model.save_pretrained(path / role)
    return str(path)


def with_own(role: str, **own: Any) -> LearnerConfig:
    section = ROLE_SECTIONS[role]
    return replace(BASE, **{section: replace(getattr(BASE, section), **own)})


# Tests of the options


def test_the_own_options_of_a_role_replace_only_the_same_options_of_the_learner():
    config = replace(
        BASE,
        num_ranks=4,
        fsdp_size=2,
        critic=CriticConfig(sp_size=2, optimizer_offload=True, offload_at_transition_only=False),
        reference=ReferenceConfig(dtype=Dtype.bfloat16, frozen_dtype=Dtype.float32, fsdp_size=-1),
        reward_model=RewardModelConfig(path="judge", attention=AttentionKernel.sdpa),
        offload_at_transition_only=True,
    )
    critic, frozen, judge = (config.of_role(role) for role in ("critic", "ref", "rm"))
    changed = {"sp_size": 2, "optimizer_offload": True, "offload_at_transition_only": False}
    assert critic == replace(config, **changed)
    assert frozen == replace(config, dtype=Dtype.bfloat16, frozen_dtype=Dtype.float32, fsdp_size=-1)
    assert (judge.attention, judge.offload_at_transition_only) == (AttentionKernel.sdpa, True)
    assert config.of_role("actor") == config
    assert critic.of_role("critic") == critic
    assert config.option_name("critic", "sp_size") == "learner.critic.sp_size"
    assert config.option_name("ref", "sp_size") == config.option_name("actor", "sp_size") == "learner.sp_size"


def test_a_role_in_a_pool_of_another_size_shards_over_all_its_ranks_by_default():
    config = replace(BASE, num_ranks=4, sp_size=2, fsdp_size=2, critic=CriticConfig(sp_size=1))
    assert [config.of_role(role, num_ranks=6).fsdp_size for role in ("critic", "ref")] == [-1, -1]
    assert config.of_role("critic", num_ranks=3).num_ranks == 3
    with pytest.raises(ValueError, match="sp_size=2, num_ranks=3"):
        config.of_role("ref", num_ranks=3)
    own = replace(config, critic=CriticConfig(fsdp_size=3))
    assert own.of_role("critic", num_ranks=6).fsdp_size == 3


# Tests of the scores (log-probs, values or rewards) that the roles compute


def all_scores(directory: str, config: LearnerConfig, roles: Sequence[str]) -> dict[str, dict[SampleKey, np.ndarray]]:
    process = Process(directory, config, roles)
    return {role: process.scores(role) for role in roles}


def merged(parts: Sequence[Mapping[str, Mapping[SampleKey, np.ndarray]]], role: str) -> dict[SampleKey, np.ndarray]:
    """Merge the scores of all ranks. Each sample must have only one score."""
    found = [(key, value) for part in parts for key, value in part[role].items()]
    assert len(found) == len(dict(found)) == 2 * NUM_GROUPS
    return dict(found)


@pytest.fixture(scope="module")
def scores_with_the_actors_options(directory: str) -> list[dict[str, dict[SampleKey, np.ndarray]]]:
    return run_on_ranks(2, all_scores, directory, BASE, ["rm", "ref", "critic"])


@pytest.mark.long
@pytest.mark.parametrize("role", ["ref", "critic", "rm"])
@pytest.mark.parametrize(
    ("own", "tolerance"),
    [
        pytest.param({"sp_size": 2}, 1e-5, id="sp"),
        pytest.param({"max_tokens_per_micro_batch": 32, "share_prompts": False}, 1e-5, id="budget"),
        pytest.param({"dtype": Dtype.bfloat16}, 0.1, id="dtype"),
        pytest.param({"fsdp_size": 1, "param_offload": True}, 1e-5, id="copies-offloaded-by-use"),
        pytest.param({"offload_policy": True}, 1e-5, id="on-the-host"),
    ],
)
def test_the_own_options_of_a_role_do_not_change_its_scores(
    directory, scores_with_the_actors_options, role, own, tolerance
):
    got = merged(run_on_ranks(2, all_scores, directory, with_own(role, **own), [role]), role)
    want = merged(scores_with_the_actors_options, role)
    assert got.keys() == want.keys()
    largest = max(float(np.abs(got[key] - want[key]).max()) for key in want)
    assert largest <= tolerance
    assert (largest > 1e-5) == (tolerance > 1e-5), "another dtype must change the numbers"


# Tests of several roles in one process


@pytest.mark.parametrize("order", [("ref", "critic"), ("critic", "ref")])
def test_roles_with_different_sp_sizes_share_the_fetched_groups(directory, scores_with_the_actors_options, order):
    """If ``ref`` fetches first, each rank has fetched other groups. But the critic's sp group needs the same groups."""
    found = run_on_ranks(2, all_scores, directory, with_own("critic", sp_size=2), order)
    for role in order:
        got, want = merged(found, role), merged(scores_with_the_actors_options, role)
        for key, value in want.items():
            np.testing.assert_allclose(got[key], value, atol=1e-5)


def test_roles_with_three_different_layouts_compute_the_scores_of_one_layout(directory, scores_with_the_actors_options):
    config = replace(
        BASE,
        num_ranks=4,
        sp_size=2,
        reference=ReferenceConfig(sp_size=4),
        critic=replace(BASE.critic, sp_size=1, fsdp_size=2),
    )
    order = ["critic", "rm", "ref"]
    found = run_on_ranks(4, all_scores, directory, config, order)
    for role in order:
        got, want = merged(found, role), merged(scores_with_the_actors_options, role)
        for key, value in want.items():
            np.testing.assert_allclose(got[key], value, atol=1e-5)


WITHOUT_KL = replace(ALGORITHM, kl_coef=0.0, kl_reward_coef=0.0)


def a_batch_that_the_actor_loses(directory: str) -> tuple[set[int], int]:
    """Let the buffer lose all groups after the critic has fetched its groups, and before the actor fetches its groups.

    Returns a pair: the ids of the lost groups, and the number of updates that the critic made.
    """
    config = replace(with_own("critic", sp_size=2), num_ranks=4)
    process = Process(directory, config, ["critic", "actor"], WITHOUT_KL)
    actor, critic = process.roles["actor"], process.roles["critic"]
    critic.score(process.batch("critic"), send=False)
    Buffer.lost = set(range(NUM_GROUPS))
    with pytest.raises(BatchLost, match="of 'actor' did not find"):
        actor.step(process.batch("actor"))
    with pytest.raises(BatchLost, match="of 'critic' did not find"):
        critic.step(process.batch("critic"))
    lost = {*critic.forget_batch(), *actor.forget_batch()}
    Buffer.lost = set()
    process.scores("critic")
    critic.step(process.batch("critic"))
    assert isinstance(critic.model, Trainer)
    return lost, critic.model.optimizer.num_updates


def test_a_batch_that_one_role_loses_is_lost_for_all_roles_of_the_process(directory):
    found = run_on_ranks(4, a_batch_that_the_actor_loses, directory)
    assert set().union(*(lost for lost, _ in found))
    assert {num_updates for _, num_updates in found} == {1}


def bytes_on_the_device(directory: str) -> list[dict[str, int]]:
    """Return how many bytes each role has on the device, at four times.

    The times are: after the start, after scoring and steps, after `rollout_mode`, and after `trainer_mode`.
    """
    config = replace(with_own("ref", param_offload=True), offload_at_transition_only=True)
    config = replace(config, critic=replace(config.critic, optimizer_offload=True, param_offload=False))
    process = Process(directory, config, ["ref", "critic", "actor"])

    def now() -> dict[str, int]:
        return {role: worker.offload.device_bytes() for role, worker in process.roles.items()}

    found = [now()]
    for role in ("ref", "critic"):
        process.roles[role].score(process.batch(role), send=False)
    for role in ("actor", "critic"):
        process.roles[role].step(process.batch(role))
    found.append(now())
    for act in ("rollout_mode", "trainer_mode"):
        for worker in process.roles.values():
            getattr(worker, act)(*[1] * (act == "rollout_mode"))
        found.append(now())
    return found


def test_each_role_follows_its_own_offload_options(directory):
    for found in run_on_ranks(2, bytes_on_the_device, directory):
        started, used, generating, training = found
        weights = started["actor"]
        assert started["ref"] == 0 < weights
        assert used["ref"] == 0
        assert used["actor"] == pytest.approx(3 * weights, rel=0.01)
        assert used["critic"] == started["critic"] == generating["critic"]  # the critic's own options do not offload it
        assert (generating["ref"], generating["actor"]) == (0, 0)
        assert training["actor"] == used["actor"]


def gathered_after_scoring(directory: str) -> list[bool]:
    process = Process(directory, with_own("ref", resharding=Resharding.update), ["ref"])
    process.scores("ref")
    modules = process.roles["ref"].model.head.modules()
    units: list[Any] = [module for module in modules if isinstance(module, FSDPModule)]
    return [module._get_fsdp_state()._fsdp_param_group.is_unsharded for module in units]


def test_a_role_stores_only_its_shards_after_scoring(directory):
    for units in run_on_ranks(2, gathered_after_scoring, directory):
        assert units
        assert not any(units)
