"""Critic and reward model on any mesh, compared with plain Hugging Face forwards and with one process."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from learner import fsdp, heads
from learner.advantages import BatchAdvantages
from learner.config import AlgorithmConfig, CriticConfig, Device, LearnerConfig, OptimizerConfig
from learner.heads import SCORE_HEAD
from learner.losses import value_loss, value_objective
from learner.packed_model import PackedModel
from learner.roles import CRITIC, REWARD_MODEL
from learner.trainer import LearnerStep, Trainer
from learner.types import TokenSequence
from tests.support.policy_step import share_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import FAMILIES, TRAINED_FAMILIES, VOCABULARY, random_sequences, save_tiny_model
from tests.support.whole_weights import assert_weights_equal, weights_of

# eps is large. Otherwise AdamW would turn rounding errors in tiny gradients into updates of full size.
CONFIG = LearnerConfig(
    device=Device.cpu,
    max_tokens_per_micro_batch=100,
    critic=CriticConfig(value_clip=0.2, optimizer=OptimizerConfig(lr=1e-2, clip_grad_norm=0.5, eps=1e-4)),
)


def critic_of(path: str, config: LearnerConfig = CONFIG, total_updates: int = 4) -> tuple[Trainer, LearnerStep]:
    trainer = Trainer(config, CRITIC, model_path=path, total_updates=total_updates)
    return trainer, LearnerStep(trainer, value_objective(config.critic.value_clip))


def save_classifier(directory: Path, family: str, auto_class: type) -> str:
    """Save a classifier whose score head has large weights. Returns the folder."""
    backbone = save_tiny_model(directory / "causal", family)
    torch.manual_seed(1)
    model = auto_class.from_pretrained(backbone, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    if model.score.bias is not None:
        torch.nn.init.constant_(model.score.bias, 0.3)
    model.save_pretrained(directory / "classifier")
    return str(directory / "classifier")


def with_returns(sequences: list[TokenSequence]) -> list[TokenSequence]:
    """Return the sequences with old values and returns of many magnitudes."""
    rng = np.random.default_rng(5)
    return [
        replace(
            s,
            columns={
                "values": rng.normal(size=len(s.input_ids)).astype(np.float32),
                "returns": (rng.normal(size=len(s.input_ids)) * 10.0 ** rng.integers(-2, 2)).astype(np.float32),
            },
        )
        for s in sequences
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_values_equal_a_plain_forward_at_the_previous_token(tmp_path, family):
    path = save_classifier(tmp_path, family, AutoModelForTokenClassification)
    sequences = random_sequences(9)
    values = PackedModel(CONFIG, CRITIC, model_path=path).scores(sequences)
    plain = AutoModelForTokenClassification.from_pretrained(path).eval()
    for sequence, got in zip(sequences, values, strict=True):
        with torch.no_grad():
            logits = plain(torch.from_numpy(sequence.input_ids)[None].long()).logits[0, :, 0].numpy()
        want = np.where(sequence.loss_mask, np.roll(logits, 1), 0.0)
        np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.concatenate(values).std() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_a_plain_forward_at_the_last_token(tmp_path, family):
    path = save_classifier(tmp_path, family, AutoModelForSequenceClassification)
    sequences = [replace(s, columns={}) for s in random_sequences(9)]
    sequences.append(TokenSequence(input_ids=np.array([3]), loss_mask=np.array([False])))
    scores = [s[-1] for s in PackedModel(CONFIG, REWARD_MODEL, model_path=path).scores(sequences)]
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        want = [plain(torch.from_numpy(s.input_ids)[None].long()).logits.item() for s in sequences]
    np.testing.assert_allclose(scores, want, atol=2e-5)
    assert np.std(want) > 0.1


@pytest.mark.long
@pytest.mark.parametrize("family", [family for family in TRAINED_FAMILIES if family not in FAMILIES])
def test_critic_and_reward_model_of_every_family_have_a_linear_head_on_the_backbone(tmp_path, family):
    path = save_tiny_model(tmp_path / "causal", family, initializer_range=0.3)
    critic = PackedModel(CONFIG, CRITIC, model_path=path)
    head = critic.pretrained.score
    torch.nn.init.normal_(head.weight)
    critic.pretrained.save_pretrained(tmp_path / "classifier")
    rewards = PackedModel(CONFIG, REWARD_MODEL, model_path=str(tmp_path / "classifier"))
    sequences = [replace(s, columns={}) for s in random_sequences(5)]
    backbone = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    for sequence, values, scores in zip(sequences, critic.scores(sequences), rewards.scores(sequences), strict=True):
        with torch.no_grad():
            hidden = backbone(torch.from_numpy(sequence.input_ids)[None].long()).last_hidden_state[0]
            outputs = (hidden @ head.weight[0]).numpy()
        np.testing.assert_allclose(values, np.where(sequence.loss_mask, np.roll(outputs, 1), 0.0), atol=1e-4)
        assert scores[-1] == pytest.approx(outputs[-1], abs=1e-4)
        assert len(outputs) == 2 or outputs.std() > 0.1


def test_a_critic_loads_the_part_of_its_head_that_was_saved(tmp_path):
    critic = PackedModel(CONFIG, CRITIC, model_path=save_tiny_model(tmp_path / "causal")).pretrained
    torch.nn.init.ones_(critic.score.weight)
    critic.score.bias = None
    critic.save_pretrained(tmp_path / "without_bias")
    again = PackedModel(CONFIG, CRITIC, model_path=str(tmp_path / "without_bias")).pretrained
    assert again.score.weight.detach().unique().tolist() == [1.0]
    assert again.score.bias.tolist() == [0.0]


def test_the_error_for_a_too_long_sequence_names_the_option_of_the_role(tmp_path):
    path = save_classifier(tmp_path, "qwen3", AutoModelForTokenClassification)
    own = replace(CONFIG, critic=replace(CONFIG.critic, max_tokens_per_micro_batch=3)).of_role("critic")
    for config, option in ((own, "learner.critic.max"), (replace(CONFIG, max_tokens_per_micro_batch=3), "learner.max")):
        model, _ = critic_of(path, config)
        with pytest.raises(ValueError, match=f"{option}_tokens_per_micro_batch must hold the longest sequence, got 3"):
            model.scores(random_sequences(2))


def test_a_causal_model_becomes_a_critic_that_predicts_zero_and_learns(tmp_path):
    config = replace(CONFIG, critic=replace(CONFIG.critic, value_clip=0.0))
    trainer, step = critic_of(save_tiny_model(tmp_path), config, total_updates=40)
    sequences = random_sequences(6)
    assert not np.concatenate(trainer.scores(sequences)).any()
    sequences = [
        replace(s, columns={"values": 0 * s.columns["advantages"], "returns": np.cumsum(s.loss_mask, dtype=np.float32)})
        for s in sequences
    ]
    history = [step.make_updates(sequences) for _ in range(40)]
    assert history[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert history[0]["value_loss"] == pytest.approx(
        np.mean(np.concatenate([0.5 * s.columns["returns"][s.loss_mask] ** 2 for s in sequences])), rel=1e-5
    )
    assert history[-1]["value_loss"] < 0.2 * history[0]["value_loss"]
    assert history[-1]["explained_variance"] > 0.5
    assert history[0]["num_tokens"] == sum(s.loss_mask.sum() for s in sequences)


@pytest.mark.long
def test_the_critic_learns_rewards_that_depend_only_on_the_prompt(tmp_path):
    """As in a run, each step first computes values, then computes the returns, and then makes an update."""
    config = replace(CONFIG, critic=CriticConfig(optimizer=OptimizerConfig(lr=1e-2)))
    trainer, step = critic_of(save_tiny_model(tmp_path), config, total_updates=60)
    advantages = BatchAdvantages(AlgorithmConfig(advantage="gae"), trainer.mesh)
    rng, explained = np.random.default_rng(0), []
    for _ in range(60):
        tokens = rng.integers(0, VOCABULARY, (32, 8)).astype(np.int32)
        sequences = [
            TokenSequence(input_ids=ids, loss_mask=np.arange(8) >= rng.integers(2, 8), trajectory=(index, 0))
            for index, ids in enumerate(tokens)
        ]
        rewards = {(index, 0): float(ids[0] >= VOCABULARY // 2) for index, ids in enumerate(tokens)}
        valued = [s.with_column("values", v) for s, v in zip(sequences, trainer.scores(sequences), strict=True)]
        assigned, _ = advantages.assign(valued, rewards)
        explained.append(step.make_updates(assigned)["explained_variance"])
    assert explained[0] == pytest.approx(0.0, abs=1e-6)
    assert np.mean(explained[-10:]) > 0.8


def test_a_reward_model_without_its_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trained sequence classifier, got .* without \['score\.weight'\]"):
        PackedModel(CONFIG, REWARD_MODEL, model_path=save_tiny_model(tmp_path))


def test_a_critic_with_several_labels_is_refused(tmp_path):
    backbone = save_tiny_model(tmp_path / "causal")
    AutoModelForTokenClassification.from_pretrained(backbone, num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match="one label"):
        PackedModel(CONFIG, CRITIC, model_path=str(tmp_path / "three"))


def test_the_clipped_value_loss_has_golden_numbers():
    values = torch.tensor([1.0, 0.1, 1.0, -3.0], requires_grad=True)
    old, returns = torch.tensor([0.0, 0.0, 0.9, 0.0]), torch.tensor([2.0, 2.0, 2.0, 1.0])
    loss, clipped = value_loss(values, old, returns, clip=0.2)
    # The loss uses the larger of two squared errors: the error of the value, and the error of the clipped value.
    # It uses the clipped first value, because (1 - 2)² is less than (0.2 - 2)². Values 2 and 3 are inside the bounds.
    # The loss uses the last value without clipping, because (-3 - 1)² is more than (-0.2 - 1)².
    torch.testing.assert_close(loss, torch.tensor([1.62, 1.805, 0.5, 8.0]))
    assert clipped.tolist() == [True, False, False, False]
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -1.9, -1.0, -4.0]))
    plain, never = value_loss(values, old, returns, clip=0.0)
    torch.testing.assert_close(plain, torch.tensor([0.5, 1.805, 0.5, 8.0]))
    assert not never.any()


def test_a_value_inside_the_interval_is_never_counted_as_clipped():
    """In floating point, old + (new - old) can differ from new in the last bit. This difference is not clipping."""
    generator = torch.Generator().manual_seed(3)
    old = -0.18 * torch.rand(100_000, generator=generator)
    values = 0.02 * torch.rand(100_000, generator=generator)
    assert (old + (values - old) != values).float().mean() > 0.05  # check that rounding occurs
    returns = 3 * torch.randn(100_000, generator=generator)
    loss, clipped = value_loss(values, old, returns, clip=0.2)
    assert not clipped.any()
    assert torch.equal(loss, 0.5 * (values - returns).square())


def step_on(path: str, config: LearnerConfig, num_sequences: int) -> tuple[list[dict], dict, list]:
    """Make two updates. Returns three results: metrics, new weights, and the values of this rank's sequences."""
    trainer, step = critic_of(
        path, replace(config, skip_selftest="other tests check the loaded model"), total_updates=2
    )
    sequences = with_returns(random_sequences(num_sequences))
    share = share_of(trainer, sequences)
    metrics = [step.make_updates(share) for _ in range(2)]
    return metrics, weights_of(trainer), trainer.scores(share)


def on_each_mesh(path: str, meshes: list[tuple[LearnerConfig, int]]) -> list:
    """Test several meshes in the same processes. On each mesh after the first, every layer is an FSDP unit."""
    outcomes = []
    for config, num_sequences in meshes:
        outcomes.append(step_on(path, config, num_sequences))
        fsdp.MIN_UNIT_NUMEL = 1
    return outcomes


def assert_same(got: tuple, want: tuple) -> None:
    for one, other in zip(got[0], want[0], strict=True):
        for name in other.keys() - {"num_micro_batches"}:
            assert one[name] == pytest.approx(other[name], rel=2e-5, abs=1e-6), name
    assert_weights_equal(got[1], want[1], atol=2e-5)


def test_two_ranks_update_the_critic_like_one_process(tmp_path):
    path = save_classifier(tmp_path, "qwen3", AutoModelForTokenClassification)
    alone, lonely = step_on(path, replace(CONFIG, max_tokens_per_micro_batch=10_000), 19), step_on(path, CONFIG, 1)
    two = replace(CONFIG, num_ranks=2)
    results = run_on_ranks(2, on_each_mesh, path, [(two, 19), (replace(two, sp_size=2), 19), (two, 1)])
    data, sequence, uneven = results[0]
    assert_same(data, alone)
    assert_same(sequence, alone)
    assert_same(uneven, lonely)
    np.testing.assert_allclose(np.concatenate(sequence[2]), np.concatenate(alone[2]), atol=2e-5)
    assert alone[0][0]["value_clip_fraction"] > 0.05
    assert "score.bias" in alone[1]


@pytest.mark.long
def test_four_ranks_update_the_critic_like_one_process(tmp_path):
    path = save_classifier(tmp_path, "qwen3", AutoModelForTokenClassification)
    alone = step_on(path, replace(CONFIG, max_tokens_per_micro_batch=10_000), 19)
    four = replace(CONFIG, num_ranks=4)
    meshes = [(replace(four, sp_size=2), 19), (replace(four, sp_size=4, activation_checkpointing=True), 19)]
    for outcome in run_on_ranks(4, on_each_mesh, path, meshes)[0]:
        assert_same(outcome, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_is_float32_and_not_rounded_to_the_dtype_of_the_model(dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 1, bias=True).to(dtype)
    with torch.no_grad():
        linear.bias.fill_(100.0)  # near 100, bfloat16 can only represent multiples of 0.5
    hidden = torch.randn(50, 64).to(dtype)
    head = SimpleNamespace(pretrained=SimpleNamespace(**{SCORE_HEAD: linear}), hidden_states=lambda batch: hidden)
    (scores,) = heads.scores_at(head, None, torch.arange(50))
    exact = hidden.double() @ linear.weight.double().T[:, 0] + linear.bias.double()
    assert scores.dtype is torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=0, atol=1e-4)
    scores.sum().backward()
    assert linear.weight.grad.dtype is dtype
