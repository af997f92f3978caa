"""Every episode within its token budget fits the learner. A run whose budget does not fit the learner is refused."""

import json

import numpy as np
import pytest

from asyncrl.checks import check_files, check_options
from asyncrl.cli.compose import compose_run
from asyncrl.config import episode_context, longest_sequence, override_of
from asyncrl.core.errors import EpisodeOverflow
from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import FinishReason
from learner.packing import Packer
from learner.types import group_sequences
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.engine import SampleOutput
from rollout_fleet.episodes import Episode, EpisodeBudget
from rollout_fleet.episodes.player import EpisodePlayer

BASE = (
    *("experiment=custom", "rollout_fleet.engine=transformers"),
    *("data.max_prompt_tokens=20", "rollout_fleet.sampling.max_new_tokens=200"),
    *("learner.max_tokens_per_micro_batch=128", "rollout_fleet.environment.name=game.py:Game"),
)
CONTEXT = "rollout_fleet.environment.max_context=128"
GSPO = ("algorithm.loss=gspo", "algorithm.clip_low=0.01", "algorithm.clip_high=0.01")


def compose(assets, *overrides):
    data = [f"data.train_files=[{assets.train}]", f"data.eval_files=[{assets.held_out}]"]
    return compose_run([*BASE, f"model.path={assets.model}", *data, *overrides])


def check(config):
    check_options(config)
    check_files(config)


@pytest.mark.parametrize("overrides", [(), (CONTEXT,), ("rollout_fleet.environment.max_context=21",)])
def test_max_new_tokens_may_exceed_the_context_of_an_episode(assets, overrides):
    check(compose(assets, *overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([CONTEXT, "learner.max_tokens_per_micro_batch=100"], r"max_context = 128, got 100 x 1; .* lower max_context"),
        (
            ["algorithm.advantage=turn_gae", CONTEXT, "learner.critic.max_tokens_per_micro_batch=64"],
            r"learner.critic.max_tokens_per_micro_batch x learner.sp_size must hold .* = 128, got 64 x 1",
        ),
        (
            ["rollout_fleet.environment.max_context=129", "learner.max_tokens_per_micro_batch=200"],
            r"must be <= the model's 128 positions, got 129",
        ),
        (["rollout_fleet.environment.max_context=20"], r"must be above data.max_prompt_tokens = 20, got 20"),
        (["data.max_prompt_tokens=128"], r"micro-batch hold, must be above data.max_prompt_tokens = 128, got 128"),
        (
            ["rollout_fleet.environment.name=", "data.environment_key=where"],
            r"data.max_prompt_tokens \+ rollout_fleet.sampling.max_new_tokens = 220, got 128 x 1",
        ),
        (
            [
                *("rollout_fleet.environment.name=", "data.environment_key=where", CONTEXT),
                *("rollout_fleet.sampling.max_new_tokens=9", "learner.max_tokens_per_micro_batch=127"),
            ],
            r"must hold the longest path of an episode, .* = 128, got 127 x 1",
        ),
    ],
)
def test_a_path_that_does_not_fit_every_role_is_refused_with_the_options(assets, overrides, message):
    with pytest.raises(ValueError, match=message):
        check(compose(assets, *overrides))


def test_the_longest_path_excludes_the_positions_that_sglang_reserves(assets):
    sglang = "rollout_fleet.engine=sglang"
    assert longest_sequence(compose(assets, sglang)) == 122
    check(compose(assets, sglang, "rollout_fleet.environment.max_context=122"))
    words = r"must be <= the model's 128 positions less 6 that SGLang reserves, got"
    with pytest.raises(ValueError, match=rf"max_context {words} 123"):
        check(compose(assets, sglang, "rollout_fleet.environment.max_context=123"))
    answer = ["rollout_fleet.environment.name=", "rollout_fleet.sampling.max_new_tokens=103"]
    with pytest.raises(ValueError, match=rf"max_new_tokens {words} 20 \+ 103 = 123"):
        check(compose(assets, sglang, *answer))


def test_the_cache_of_an_engine_holds_the_longest_path(assets):
    sglang = ["rollout_fleet.engine=sglang", "rollout_fleet.environment.max_context=100"]
    check(compose(assets, *sglang, "rollout_fleet.sglang.max_total_tokens=106"))
    with pytest.raises(ValueError, match=r"max_total_tokens must be >= 106, .* 6 positions that SGLang .*, got 105"):
        check(compose(assets, *sglang, "rollout_fleet.sglang.max_total_tokens=105"))


def test_sequence_parallel_ranks_share_a_path(assets):
    check(compose(assets, CONTEXT, "learner.max_tokens_per_micro_batch=64", "learner.num_ranks=2", "learner.sp_size=2"))


def test_without_max_context_the_model_and_the_roles_limit_a_path(assets, tmp_path):
    small = ["learner.max_tokens_per_micro_batch=100"]
    assert longest_sequence(compose(assets)) == 128
    assert longest_sequence(compose(assets, *small)) == 100
    check(compose(assets, *small))
    critic = [*small, "algorithm.advantage=turn_gae", "learner.critic.max_tokens_per_micro_batch=64"]
    assert longest_sequence(compose(assets, *critic)) == 64
    check(compose(assets, *critic))
    with pytest.raises(ValueError, match=r"must be above data.max_prompt_tokens = 64, got 64"):
        check(compose(assets, *critic, "data.max_prompt_tokens=64"))
    folder = tmp_path / "model"
    folder.mkdir()
    for file in assets.model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "config.json").read_text())
    del settings["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(settings))
    unbounded = compose(assets, f"model.path={folder}")
    check(unbounded)
    assert longest_sequence(unbounded) == 128


@pytest.mark.long
@pytest.mark.parametrize(
    "loss",
    [
        GSPO,
        ("algorithm.anchor=proximal", "algorithm.weight=sequence"),
        ("algorithm.masks=[token,k3]",),
        (override_of("algorithm.loss", f"{__file__}:whole_loss"),),
    ],
)
def test_a_loss_of_whole_trajectories_needs_max_tree_tokens(assets, loss):
    for most, shown in ((0, "no limit"), (20, "20"), (129, "129")):
        bound = f"rollout_fleet.environment.max_tree_tokens={most}"
        with pytest.raises(
            ValueError, match=rf"max_tree_tokens must be above .* = 20 and at most .* = 128 .*got {shown}:"
        ):
            check(compose(assets, CONTEXT, *loss, bound))
    check(compose(assets, CONTEXT, *loss, "rollout_fleet.environment.max_tree_tokens=128"))


def whole_loss(inputs, config):
    raise AssertionError("the check must not call the loss")


def test_a_loss_per_token_does_not_need_max_tree_tokens(assets):
    check(compose(assets, CONTEXT, "algorithm.masks=[token]"))
    check(compose(assets, *GSPO, "rollout_fleet.environment.name=", "rollout_fleet.sampling.max_new_tokens=9"))


def test_the_longest_sequence_is_a_path_or_an_answer(assets):
    assert longest_sequence(compose(assets)) == 128
    assert longest_sequence(compose(assets, "rollout_fleet.environment.max_context=90")) == 90
    assert longest_sequence(compose(assets, "rollout_fleet.environment.name=")) == 220
    assert longest_sequence(compose(assets, "rollout_fleet.environment.name=", "data.environment_key=where")) == 220


def test_every_tree_within_the_bound_fits_one_micro_batch():
    """Random episodes that use their whole budget fit the learner, with and without shared prompts."""
    rng, budget, full = np.random.default_rng(0), 60, 0
    for number in range(200):
        limits = EpisodeBudget(max_turns=12, max_tokens=99, max_context=40, max_tree_tokens=budget)
        episode = Episode(f"{number}", np.arange(5, dtype=np.int32), limits)
        parents = [0, -1]
        for _ in range(14):
            tokens = rng.integers(0, 9, rng.integers(1, 6)).tolist()
            try:
                turn = episode.sample(int(rng.choice(parents)), tokens, SamplingConfig(max_new_tokens=6))
            except EpisodeOverflow:
                full += 1
                continue
            if turn in episode.running:
                (request,) = episode.next_requests()
                episode.take(request.id, answer(rng, request.sampling.max_new_tokens))
            parents.append(turn)
        group = TrajectoryGroup.from_trajectories([episode.trajectory(1.0)], group_id=0, attempt=0)
        for share in (False, True):
            for whole in (False, True):
                sequences = group_sequences(group)
                (one,) = Packer(max_tokens=budget, whole=whole, share_prompts=share, keep_branches=True).pack(sequences)
                assert len(one.input_ids) <= budget
    assert full > 200


def answer(rng, most):
    length = int(rng.integers(1, most + 1))
    return SampleOutput(
        token_ids=rng.integers(0, 9, length).astype(np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.zeros(length, dtype=np.int32),
        finish_reason=FinishReason.stop,
    )


def test_the_player_gives_each_episode_the_budget_of_the_options(assets):
    options = ["max_turns=3", "max_tokens=50", "max_tree_tokens=100", "max_context=90"]
    config = compose(assets, *(f"rollout_fleet.environment.{option}" for option in options))
    player = EpisodePlayer(config.rollout_fleet, model_path=str(assets.model), max_context=episode_context(config))
    assert player.budget == EpisodeBudget(max_turns=3, max_tokens=50, max_context=90, max_tree_tokens=100)
