"""Roles on Ray: fused roles and roles in separate pools compute the same numbers."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from asyncrl.checks import check_options
from asyncrl.cli.compose import compose_run
from asyncrl.config import RunConfig, learner_pools, learner_roles, requested_cpus
from asyncrl.core.errors import (
    AccountError,
    BatchLost,
    ClusterDiedError,
    DeadlineError,
    LearnerDiedError,
    WorkerDiedError,
)
from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import FinishReason, Plan, WeightOffer
from asyncrl.run.learner_group import LearnerGroup, or_death
from asyncrl.run.run_folder import RunPaths
from buffer import BufferConnection
from learner.offload import OffloadPolicy
from tests.support.tiny_models import VOCABULARY, save_tiny_model
from tests.support.trajectories import make_group

PPO = [
    "experiment=custom",
    "algorithm.advantage=gae",
    "algorithm.groups_per_step=4",
    "algorithm.samples_per_prompt=2",
    "algorithm.num_mini_batches=2",
    "algorithm.kl_reward_coef=0.1",
    "algorithm.kl_coef=0.05",
    "correction=tis",
    "learner.device=cpu",
    "learner.optimizer.lr=1e-2",
    "learner.optimizer.eps=1e-4",
    "learner.critic.optimizer.lr=1e-2",
    "learner.critic.optimizer.eps=1e-4",
    "total_steps=4",
    "ray.start_timeout_s=60",
]
DEADLINE_S = 240
pytestmark = pytest.mark.timeout(600)


def group(group_id: int, version: int = 0) -> TrajectoryGroup:
    """Return a group of two samples. The first sample has two turns of the policy."""
    rng = np.random.default_rng(group_id)
    lengths = np.array([5, 3], dtype=np.int32)
    return make_group(
        group_id=group_id,
        attempt=0,
        prompt_ids=rng.integers(0, VOCABULARY, 4).astype(np.int32),
        response_ids=rng.integers(0, VOCABULARY, 8).astype(np.int32),
        response_lengths=lengths,
        response_mask=np.array([True, True, False, True, True, True, True, True]),
        logprobs=-rng.uniform(1.0, 4.0, 8).astype(np.float32),
        versions=np.full(8, version, dtype=np.int32),
        rewards=rng.random(2).astype(np.float32),
        finish_reasons=(FinishReason.stop, FinishReason.length),
    )


class ScriptedBuffer:
    def offer(self, offer: WeightOffer) -> int:
        return 0

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        return [group(group_id, version=group_id // 100) for group_id in group_ids]

    def close(self) -> None:
        pass


class ScriptedConnection(BufferConnection):
    def sync_client(self) -> ScriptedBuffer:
        return ScriptedBuffer()


@pytest.fixture(scope="module", autouse=True)
def by_value():
    """Make Ray send the definitions of this file with each call, because workers cannot import this file."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Learners:
    """Starts learners that use the same tiny model. Each learner has its own folder."""

    def __init__(self, folder: Path) -> None:
        self.model = save_tiny_model(folder / "model")
        self._folder = folder
        self._started: list[LearnerGroup] = []

    def start(self, *overrides: str) -> LearnerGroup:
        config = compose_run([*PPO, *overrides])
        config = replace(config, model=replace(config.model, path=self.model))
        folder = self._folder / f"run{len(self._started)}"
        paths = RunPaths(
            logs=folder / "logs",
            snapshots=folder / "s",
            staging=folder / "staging",
            samples=folder / "samples",
            trajectories=None,
            tokens=folder / "tokens",
            checkpoints=folder / "checkpoints",
        )
        paths.logs.mkdir(parents=True)
        self._started.append(LearnerGroup(config, buffer=ScriptedConnection(address=""), paths=paths))
        return self._started[-1]

    def stop(self) -> None:
        for learner in self._started:
            asyncio.run(learner.stop(10))


@pytest.fixture
def learners(cluster, tmp_path):
    """Yield an object that starts learners. The fixture stops the learners at the end of the test."""
    learners = Learners(tmp_path)
    yield learners
    learners.stop()


@pytest.fixture
def start(learners):
    return learners.start


def plan_of(version: int) -> Plan:
    return Plan(version=version, groups=[group(100 * version + k, version).summary for k in range(4)])


async def run_steps(
    learner: LearnerGroup, num_steps: int = 2
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Queue all steps before the first one ends. Returns the metrics of all steps and the final weights."""
    await learner.init()
    queued = []
    for version in range(num_steps):
        plan = await learner.scored(plan_of(version))
        queued.append((learner.step(plan), learner.publish(version + 1), learner.step_critic(plan)))
    metrics = []
    for update, weights, critic in queued:
        metrics.append({**await update, **await critic})
        await weights
    await learner.finish_publish()
    return metrics, load_file(learner.checkpoints.parent / "s" / f"v{num_steps:08d}" / "model.safetensors")


def pids(learner: LearnerGroup) -> dict[str, int]:
    return {role: learner.roles[role].execute_func_rank_zero(os.getpid) for role in learner.roles.pools}


def assert_same(got: tuple, want: tuple) -> None:
    seconds = ("fetch_s", "prepare_s", "train_s")
    times = ("started_at", "ended_at", *seconds, *(f"critic.{name}" for name in seconds))
    for one, other in zip(got[0], want[0], strict=True):
        assert one.keys() == other.keys()
        for name in other.keys() - {*times, "num_micro_batches", "critic.num_micro_batches"}:
            assert one[name] == pytest.approx(other[name], rel=5e-5, abs=2e-6), name
    for name, value in want[1].items():
        torch.testing.assert_close(got[1][name], value, atol=3e-5, rtol=0, msg=name)


async def next_step(learner: LearnerGroup) -> dict[str, float]:
    plan = plan_of(2)
    update, critic = learner.step(plan), learner.step_critic(plan)
    return {**await update, **await critic}


async def train_on_other_tokens(learner: LearnerGroup) -> None:
    plan = plan_of(3)
    first = replace(plan.groups[0], digest=plan.groups[0].digest ^ 1)
    await learner.step(replace(plan, groups=[first, *plan.groups[1:]]))


async def fail(learner: LearnerGroup) -> None:
    summary = group(1).summary
    lengths, rewards = (*summary.response_lengths, 3), (*summary.rewards, 0.0)  # plan a sample that the group lacks
    plan = Plan(version=7, groups=[replace(summary, response_lengths=lengths, rewards=rewards)])
    await learner.step(plan)


@pytest.fixture(scope="module")
def fused(cluster, tmp_path_factory):
    """Return the results of a learner with all roles in one process, before its death and after its restart.

    The learner makes two steps, a checkpoint and a third step. In the next step, the tokens differ from the plan. The
    step after that fails. Then the process is killed. The restarted learner repeats the third step from the checkpoint.
    """
    learners = Learners(tmp_path_factory.mktemp("fused"))
    learner = learners.start()

    async def act() -> SimpleNamespace:
        steps = await run_steps(learner)
        await learner.save(2, {"prompts": 8}, wait=True)
        facts = SimpleNamespace(
            steps=steps,
            checkpoint=learner.checkpoints / "v00000002",
            third_step=await next_step(learner),
            pids=await asyncio.to_thread(pids, learner),
            others=(await asyncio.gather(train_on_other_tokens(learner), return_exceptions=True))[0],
            failure=(await asyncio.gather(fail(learner), return_exceptions=True))[0],
        )
        os.kill(facts.pids["actor"], signal.SIGKILL)
        facts.death = (await asyncio.gather(learner.finish_publish(), return_exceptions=True))[0]
        await learner.end()
        facts.meanwhile = (await asyncio.gather(learner.save_policy(Path("x")), return_exceptions=True))[0]
        await learner.begin_again(facts.checkpoint, 2, incarnation=1)
        facts.third_step_again = await next_step(learner)
        facts.published = sorted(path.name for path in (learner.checkpoints.parent / "s").glob("v*"))
        return facts

    try:
        return asyncio.run(asyncio.wait_for(act(), DEADLINE_S))
    finally:
        learners.stop()


@pytest.mark.long
def test_fused_roles_share_a_process_and_compute_the_same_as_separate_pools(fused, start) -> None:
    assert len(set(fused.pids.values())) == 1
    assert set(fused.pids) == {"actor", "critic", "ref"}
    apart = start("placement.pools={values:1,frozen:1}", "placement.critic=values", "placement.reference=frozen")
    got = asyncio.run(asyncio.wait_for(run_steps(apart), DEADLINE_S))
    assert len(set(pids(apart).values())) == 3
    assert_same(got, fused.steps)
    first, second = fused.steps[0]
    assert first["reward_kl"] != 0
    assert first["critic.value_loss"] > 0
    assert first["critic.num_tokens"] == first["witnessed_tokens"] == 4 * 7
    assert second["critic.explained_variance"] != first["critic.explained_variance"]
    assert first["loss"] != pytest.approx(second["loss"], abs=1e-5)


@pytest.mark.long
def test_fused_roles_with_different_options_compute_the_same(fused, start) -> None:
    """The actor is sequence-parallel. Reference and critic are data-parallel. The critic has smaller micro-batches."""
    own = start(
        "learner.num_ranks=2",
        "learner.sp_size=2",
        "learner.max_tokens_per_micro_batch=64",
        "learner.reference.sp_size=1",
        "learner.reference.param_offload=true",
        "learner.reference.frozen_dtype=float32",
        "learner.critic.sp_size=1",
        "learner.critic.fsdp_size=1",
        "learner.critic.max_tokens_per_micro_batch=12",
        "learner.critic.share_prompts=false",
        "learner.critic.optimizer_offload=true",
        "learner.critic.gradient_sync=micro_batch",
        "learner.critic.activation_checkpointing=true",
    )
    got = asyncio.run(asyncio.wait_for(run_steps(own), DEADLINE_S))
    assert len(set(pids(own).values())) == 1
    assert_same(got, fused.steps)
    for one, other in zip(got[0], fused.steps[0], strict=True):
        assert one["critic.num_micro_batches"] > other["critic.num_micro_batches"]


def bytes_of_roles() -> list[int]:
    """Return the bytes that each role of this process has on the device."""
    gc.unfreeze()  # the worker has called gc.freeze, which hides its objects from gc.get_objects
    return [policy.device_bytes() for policy in gc.get_objects() if isinstance(policy, OffloadPolicy)]


@pytest.mark.long
def test_every_role_of_the_actors_pool_leaves_the_device_to_the_engines(start, tmp_path) -> None:
    judge = AutoModelForSequenceClassification.from_pretrained(save_tiny_model(tmp_path / "base"), num_labels=1)
    judge.save_pretrained(tmp_path / "rm")
    learner = start(
        "placement.colocated=true",
        "learner.offload_at_transition_only=true",
        "learner.critic.param_offload=true",
        "learner.critic.optimizer_offload=true",
        f"learner.reward_model.path={tmp_path / 'rm'}",
        "placement.pools={frozen: 1}",
        "placement.reference=frozen",
    )

    async def turns() -> list[list[int]]:
        await learner.init()
        found = []
        for version in range(2):
            await learner.trainer_mode()
            plan = await learner.scored(plan_of(version))
            for pending in (learner.step(plan), learner.step_critic(plan)):
                await pending
            found.append(await asyncio.to_thread(learner.roles["actor"].execute_func_rank_zero, bytes_of_roles))
            await learner.rollout_mode(version + 1)
            found.append(await asyncio.to_thread(learner.roles["actor"].execute_func_rank_zero, bytes_of_roles))
        await learner.save_policy(tmp_path / "policy")  # the engines use the device during this call
        found.append(await asyncio.to_thread(learner.roles["actor"].execute_func_rank_zero, bytes_of_roles))
        return found

    training, generating, again, *later = asyncio.run(asyncio.wait_for(turns(), DEADLINE_S))
    assert [bool(size) for size in sorted(training)] == [False, True, True]  # after use, the critic is on the host
    assert again == training
    assert generating == later[0] == later[1] == [0, 0, 0]
    assert pids(learner)["ref"] != pids(learner)["actor"]


@pytest.mark.long
def test_actor_and_critic_repeat_a_step_exactly_after_a_death_and_a_checkpoint(fused) -> None:
    assert isinstance(fused.death, LearnerDiedError)
    assert "learner" in str(fused.death)
    assert "no new ranks have started yet" in str(fused.meanwhile)
    for name in ("loss", "grad_norm", "reward_kl", "critic.value_loss", "critic.grad_norm", "critic.lr"):
        assert fused.third_step_again[name] == fused.third_step[name], name
    assert fused.published[-1] == "v00000002"


@pytest.mark.long
def test_a_step_on_unplanned_tokens_is_an_error_that_names_the_step(fused) -> None:
    assert isinstance(fused.others, AccountError)
    assert "the ranks trained step 3 on other tokens than planned" in str(fused.others)


@pytest.mark.long
def test_the_error_of_a_failed_role_is_raised_and_names_the_role(fused) -> None:
    with pytest.raises(KeyError, match="2"):
        raise fused.failure
    assert any("ReferenceWorker.score" in note for note in fused.failure.__notes__)


@pytest.mark.long
def test_a_users_advantage_has_a_critic_that_learns_before_the_policy(learners, tmp_path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from learner import TokenAdvantages, token_level\n"
        "@token_level\n"
        "def baseline(batch, config, total):\n"
        "    returns = batch.rewards + 3.0\n"
        "    return TokenAdvantages(advantages=returns - batch.values, returns=returns)\n"
    )
    only = ["algorithm.critic=true", "algorithm.kl_coef=0", "algorithm.kl_reward_coef=0"]
    learner = learners.start(f"algorithm.advantage={path}:baseline", "learner.critic.warmup_steps=2", *only)
    metrics, weights = asyncio.run(asyncio.wait_for(run_steps(learner, 4), DEADLINE_S))
    assert set(learner.roles.pools) == {"actor", "critic"}
    assert metrics[0]["critic.value_mean"] == pytest.approx(0.0, abs=0.5)
    assert metrics[0]["critic.grad_norm"] > 0
    assert metrics[3]["critic.value_loss"] < 0.8 * metrics[0]["critic.value_loss"]
    assert ["grad_norm" in step for step in metrics] == [False, False, True, True]
    assert metrics[0]["num_tokens"] == 4 * 7
    before = load_file(f"{learners.model}/model.safetensors")
    after_warm_up = load_file(learner.checkpoints.parent / "s/v00000002/model.safetensors")
    for name, value in before.items():
        torch.testing.assert_close(after_warm_up[name], value, rtol=0, atol=0)
    assert any((weights[name] != value).any() for name, value in before.items())


@pytest.mark.long
def test_training_continues_without_a_planned_group_that_gets_no_score(start, tmp_path):
    """The reward model's embedding of one token is NaN, so the group with this token has no score."""
    torch.manual_seed(3)
    groups = {summary.group_id: group(summary.group_id, 1) for summary in plan_of(1).groups}
    broken, *others = groups
    token = min(set(groups[broken].token_ids) - {token for other in others for token in groups[other].token_ids})
    classifier = AutoModelForSequenceClassification.from_pretrained(save_tiny_model(tmp_path / "base"), num_labels=1)
    torch.nn.init.normal_(classifier.score.weight)
    with torch.no_grad():
        classifier.get_input_embeddings().weight[token] = torch.nan
    classifier.save_pretrained(tmp_path / "rm")
    learner = start(
        f"learner.reward_model.path={tmp_path / 'rm'}",
        "learner.skip_selftest=its embedding is broken",
        "algorithm.advantage=grpo",
        "algorithm.kl_coef=0",
        "algorithm.kl_reward_coef=0",
        "placement.pools={judges:2}",
        "placement.reward_model=judges",
    )

    async def score() -> tuple[Plan, dict[str, float]]:
        await learner.init()
        plan = await learner.scored(plan_of(1))
        return plan, dict(await learner.step(plan))

    plan, metrics = asyncio.run(asyncio.wait_for(score(), DEADLINE_S))
    assert [summary.group_id for summary in plan.groups if not summary.is_scored] == [broken]
    classifier.eval()
    for summary in plan.groups[1:]:
        whole = groups[summary.group_id]
        for reward, response in zip(
            summary.rewards, np.split(whole.token_ids[len(whole.prompt_ids) :], [5]), strict=True
        ):
            ids = torch.from_numpy(np.concatenate([whole.prompt_ids, response])).long()
            assert reward == pytest.approx(classifier(ids[None]).logits.item(), abs=2e-5)
    assert metrics["num_tokens"] == 3 * 7
    assert metrics["grad_norm"] > 0
    assert metrics["skipped_updates"] == 0


@pytest.mark.long
def test_with_adapters_the_actor_is_also_the_reference(start) -> None:
    learner = start(
        "learner.lora.rank=4",
        "weights.adapters=false",  # `run_steps` reads whole weights, not adapters
        "algorithm.num_mini_batches=1",
    )
    metrics, _ = asyncio.run(asyncio.wait_for(run_steps(learner), DEADLINE_S))
    assert set(pids(learner)) == {"actor", "critic"}
    assert metrics[0]["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[1]["reference_kl"] > 1e-4


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["placement.critic=nowhere"], "placement.critic must name one of the pools"),
        (["placement.pools={spare:1}"], r"got \['spare'\], to which no role is assigned"),
        (["placement.pools={spare:0}"], "placement.pools.spare must be >= 1"),
        (["placement.pools={learner:2}"], "set its size with learner.num_ranks"),
        (
            ["learner.num_ranks=2", "learner.sp_size=2", "placement.pools={v:3}", "placement.critic=v"],
            "multiple of learner.sp_size=2, got 3",
        ),
        (
            ["placement.pools={v:3}", "placement.critic=v", "learner.critic.sp_size=2"],
            r"placement.pools.v must be a multiple of learner.critic.sp_size=2, got 3",
        ),
        (
            ["learner.num_ranks=3", "learner.reference.fsdp_size=2"],
            "learner.num_ranks must be a multiple of learner.reference.fsdp_size=2, got 3",
        ),
        (["learner.lora.rank=4", "learner.reference.sp_size=1"], r"reference.sp_size is an option of a role that this"),
        (["learner.reward_model.dtype=float32"], r"not have; the run has \['ref', 'critic', 'actor'\]; leave the"),
        (
            ["learner.critic.max_tokens_per_micro_batch=1500"],
            r"learner.critic.max_tokens_per_micro_batch x learner.sp_size must .* = 1536, got 1500 x 1",
        ),
        (["algorithm.advantage=grpo", "learner.critic.path=x"], "set algorithm.advantage=gae"),
        (["learner.max_tokens_per_micro_batch=1500"], r"must hold the longest sequence, .* = 1536, got 1500 x 1"),
        (
            ["learner.reward_model.path=x", "buffer.filters=[equal_rewards]"],
            "remove these filters, or leave out the reward model",
        ),
    ],
)
def test_a_wrong_placement_is_refused_by_name(overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_options(compose_run([*PPO, *overrides]))


def test_a_filter_that_reads_no_reward_is_allowed_with_a_reward_model() -> None:
    check_options(compose_run([*PPO, "learner.reward_model.path=x", "buffer.filters=[no_tokens]"]))


def test_the_algorithm_determines_the_roles() -> None:
    def roles(*overrides: str) -> RunConfig:
        return compose_run([*PPO, *overrides])

    assert learner_roles(roles()) == {"ref": "learner", "critic": "learner", "actor": "learner"}
    assert learner_roles(roles("learner.lora.rank=2")) == {"critic": "learner", "actor": "learner"}
    plain = roles("algorithm.advantage=grpo", "algorithm.kl_coef=0", "algorithm.kl_reward_coef=0")
    assert learner_roles(plain) == {"actor": "learner"}
    apart = roles("placement.pools={v:3}", "placement.critic=v", "learner.num_ranks=2")
    assert learner_pools(apart) == {"learner": 2, "v": 3}
    assert requested_cpus(apart) == 2 + 3 + 1


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (WorkerDiedError("rank 0 died"), LearnerDiedError),
        (DeadlineError("waited 20 s for the update of step 3"), LearnerDiedError),
        (BatchLost("the batch of step 4 is lost"), BatchLost),
        (ClusterDiedError("Ray's control service died"), ClusterDiedError),
        (ValueError("the loss is not a number"), ValueError),
    ],
)
async def test_only_errors_that_a_checkpoint_can_fix_count_as_the_learners_death(raised: Exception, seen: type) -> None:
    async def call() -> None:
        raise raised

    with pytest.raises(seen, match=str(raised)) as caught:
        await or_death(call(), None)
    assert type(caught.value) is seen
