"""The learner roles' workers: verl's methods on `DataProto`, compared with a plain forward pass of the model."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from asyncrl.core.errors import BatchLost
from asyncrl.single_controller.data_proto import DataProto
from learner.config import (
    AlgorithmConfig,
    Anchor,
    CriticConfig,
    Device,
    LearnerConfig,
    LoraConfig,
    OptimizerConfig,
    Weight,
)
from learner.verl_api import ActorWorker, CriticWorker, ReferenceWorker, RewardModelWorker
from tests.support.tiny_models import VOCABULARY, save_tiny_model

PROMPT, RESPONSE = 5, 6
TEMPERATURE = 0.7
CONFIG = LearnerConfig(
    device=Device.cpu,
    optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
    critic=CriticConfig(value_clip=0.0, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0)),
)
ALGORITHM = AlgorithmConfig(groups_per_step=2, samples_per_prompt=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    causal = save_tiny_model(path / "causal")
    paths = {"causal": causal}
    for name, kind in (("critic", AutoModelForTokenClassification), ("rm", AutoModelForSequenceClassification)):
        torch.manual_seed(2)
        model = kind.from_pretrained(causal, num_labels=1)
        torch.nn.init.normal_(model.score.weight)
        model.save_pretrained(path / name)
        paths[name] = str(path / name)
    return paths


@pytest.fixture(autouse=True)
def alone() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}


def rows(seed: int = 0) -> DataProto:
    """Return four rows. Prompts are padded on the left, responses on the right. The last response is empty."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, VOCABULARY, (4, PROMPT + RESPONSE), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, (prompt, response) in enumerate([(5, 6), (2, 3), (1, 4), (4, 0)]):
        attention_mask[row, : PROMPT - prompt] = 0
        attention_mask[row, PROMPT + response :] = 0
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "responses": input_ids[:, PROMPT:],
        }
    )


def each_row(data: DataProto) -> list[tuple[torch.Tensor, int]]:
    """Return a pair for each row: its tokens without padding, and the number of its response tokens."""
    batch = data.batch
    masks = batch["attention_mask"].bool()
    return [(ids[mask][None], int(mask[PROMPT:].sum())) for ids, mask in zip(batch["input_ids"], masks, strict=True)]


def padded(values: list[torch.Tensor]) -> np.ndarray:
    return np.stack([np.pad(value.numpy(), (0, RESPONSE - len(value))) for value in values])


@torch.no_grad()
def plain_log_probs(model: torch.nn.Module, data: DataProto, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    log_probs, entropies = [], []
    for ids, length in each_row(data):
        if length == 0:
            log_probs.append(torch.zeros(0))
            entropies.append(torch.zeros(0))
            continue
        logits = model(ids).logits[0, -length - 1 : -1] / temperature
        distribution = torch.distributions.Categorical(logits=logits)
        log_probs.append(distribution.log_prob(ids[0, -length:]))
        entropies.append(distribution.entropy())
    return padded(log_probs), padded(entropies)


def actor(models: dict[str, str], tmp_path: Path, config: LearnerConfig = CONFIG, **algorithm: object) -> ActorWorker:
    worker = ActorWorker(
        config,
        AlgorithmConfig(groups_per_step=2, samples_per_prompt=2, **algorithm),
        model_path=models["causal"],
        total_steps=20,
        temperature=TEMPERATURE,
        snapshot_dir=str(tmp_path / "snapshots"),
    )
    worker.init_model()
    return worker


def test_log_probs_and_entropies_equal_a_plain_forward(models, tmp_path):
    worker, data = actor(models, tmp_path), rows()
    plain = AutoModelForCausalLM.from_pretrained(models["causal"]).eval()
    for temperature, meta_info in ((TEMPERATURE, {}), (1.3, {"temperature": 1.3, "micro_batch_size": 1})):
        data.meta_info = meta_info
        got = worker.compute_log_prob(data)
        log_probs, entropies = plain_log_probs(plain, data, temperature)
        assert got.batch["old_log_probs"].shape == (4, RESPONSE)
        np.testing.assert_allclose(got.batch["old_log_probs"].numpy(), log_probs, atol=2e-5)
        np.testing.assert_allclose(got.batch["entropys"].numpy(), entropies, atol=2e-5)
        assert got.meta_info["temperature"] == temperature
    assert worker.model.head.temperature == TEMPERATURE


def test_the_reference_is_a_frozen_copy_and_equals_a_plain_forward(models):
    worker = ReferenceWorker(CONFIG, ALGORITHM, model_path=models["causal"], temperature=TEMPERATURE)
    worker.init_model()
    plain = AutoModelForCausalLM.from_pretrained(models["causal"]).eval()
    want, _ = plain_log_probs(plain, rows(), TEMPERATURE)
    got = worker.compute_ref_log_prob(rows()).batch["ref_log_prob"]
    np.testing.assert_allclose(got.numpy(), want, atol=2e-5)
    with pytest.raises(ValueError, match="role 'ref' is frozen"):
        worker.save_checkpoint("anywhere", 1)


def test_values_and_scores_are_at_the_positions_of_verl(models):
    data = rows()
    critic = CriticWorker(CONFIG, ALGORITHM, model_path=models["critic"], total_steps=20)
    critic.init_model()
    reward_model = RewardModelWorker(CONFIG, ALGORITHM, model_path=models["rm"])
    reward_model.init_model()
    values, scores = critic.compute_values(data).batch["values"], reward_model.compute_rm_score(data).batch["rm_scores"]
    plain_critic = AutoModelForTokenClassification.from_pretrained(models["critic"]).eval()
    plain_rm = AutoModelForSequenceClassification.from_pretrained(models["rm"]).eval()
    for row, (ids, length) in enumerate(each_row(data)):
        with torch.no_grad():
            logits = plain_critic(ids).logits[0, :, 0]
            score = plain_rm(ids).logits.item()
        want = np.zeros(RESPONSE)
        want[:length] = logits[len(logits) - length - 1 : -1].numpy() if length else []
        np.testing.assert_allclose(values[row].numpy(), want, atol=2e-5)
        want = np.zeros(RESPONSE)
        if length:
            want[length - 1] = score
        np.testing.assert_allclose(scores[row].numpy(), want, atol=2e-5)
    assert float(values.abs().max()) > 0.1


def test_a_critic_is_refused_if_the_estimator_does_not_use_values(models, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def outcome(rewards, group_ids):\n    return rewards\n")
    algorithm = replace(ALGORITHM, advantage=f"{own}:outcome", critic=True)
    with pytest.raises(ValueError, match=r"critic=true needs a token-level or turn-level estimator.*own.py:outcome"):
        CriticWorker(CONFIG, algorithm, model_path=models["critic"], total_steps=20).init_model()


def test_an_actor_update_trains_only_the_tokens_of_the_response_mask(models, tmp_path):
    worker, data = actor(models, tmp_path, clip_low=9.0, clip_high=9.0), rows()
    before = worker.compute_log_prob(data).batch["old_log_probs"]
    mask = data.batch["attention_mask"][:, PROMPT:].clone()
    mask[0, 3:] = 0  # an environment wrote these tokens
    advantages = torch.zeros(4, RESPONSE)
    advantages[0], advantages[1] = 1.0, -1.0
    data.batch["old_log_probs"], data.batch["advantages"] = before, advantages
    data.batch["response_mask"] = mask
    metrics = worker.update_actor(data).meta_info["metrics"]
    assert metrics["actor/num_tokens"] == 3 + 3 + 4
    assert metrics["actor/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["actor/grad_norm"] > 0
    moved = worker.compute_log_prob(data).batch["old_log_probs"] - before
    assert moved[0, :3].sum() > 0.01
    assert moved[1].sum() < -0.01


def test_the_actor_publishes_the_next_version_after_an_update(models, tmp_path):
    worker, data = actor(models, tmp_path), rows()
    worker.publish_weights(0)
    old = worker.compute_log_prob(data).batch["old_log_probs"]
    data.batch["old_log_probs"], data.batch["advantages"] = old, torch.ones(4, RESPONSE)
    worker.update_actor(data)
    worker.publish_weights(1)
    with pytest.raises(BatchLost):
        worker.publish_weights(2)


def test_two_updates_per_step_use_the_old_log_probs_of_the_batch(models, tmp_path):
    worker, data = actor(models, tmp_path, num_mini_batches=2, anchor=Anchor.proximal, weight=Weight.token), rows()
    old = worker.compute_log_prob(data).batch["old_log_probs"]
    data.batch["old_log_probs"], data.batch["advantages"] = old, torch.ones(4, RESPONSE)
    data.batch["rollout_log_probs"] = old - 0.5
    metrics = worker.update_actor(data).meta_info["metrics"]
    assert worker.model.optimizer.num_updates == 2
    assert metrics["actor/importance_weight"] == pytest.approx(np.exp(0.5), rel=1e-4)


def test_critic_updates_move_values_towards_returns(models):
    worker, data = CriticWorker(CONFIG, ALGORITHM, model_path=models["critic"], total_steps=60), rows()
    worker.init_model()
    data.batch["returns"] = torch.linspace(-1, 1, RESPONSE).expand(4, -1).contiguous()
    history = []
    for _ in range(60):
        data.batch["values"] = worker.compute_values(data).batch["values"]
        history.append(worker.update_critic(data).meta_info["metrics"])
    assert history[-1]["critic/vf_loss"] < 0.1 * history[0]["critic/vf_loss"]
    assert history[-1]["critic/explained_variance"] > 0.8
    assert {"critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr"} <= history[0].keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.batch.pop("attention_mask"), r"add \['attention_mask'\]"),
        (lambda data: data.batch["position_ids"].add_(1), "position_ids must count"),
        (
            lambda data: data.batch.set("input_ids", data.batch["input_ids"][:, :PROMPT]),
            r"shape of input_ids, \[4, 5\]",
        ),
        (lambda data: data.batch.set("responses", torch.zeros(4, 12)), r"end of input_ids, \[4, 11\], got \[4, 12\]"),
    ],
)
def test_invalid_rows_are_refused(models, tmp_path, change, message):
    data = rows()
    change(data)
    with pytest.raises(ValueError, match=message):
        actor(models, tmp_path).compute_log_prob(data)


def test_a_row_without_attended_tokens_is_treated_as_a_row_without_a_response(models, tmp_path):
    critic = CriticWorker(CONFIG, ALGORITHM, model_path=models["critic"], total_steps=20)
    reward_model = RewardModelWorker(CONFIG, ALGORITHM, model_path=models["rm"])
    critic.init_model()
    reward_model.init_model()
    worker, data, empty = actor(models, tmp_path), rows(), rows()
    empty.batch["attention_mask"][1] = 0
    for call, name in (
        (worker.compute_log_prob, "old_log_probs"),
        (critic.compute_values, "values"),
        (reward_model.compute_rm_score, "rm_scores"),
    ):
        want, got = call(data).batch[name], call(empty).batch[name]
        want[1] = 0.0
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    empty.batch["old_log_probs"], empty.batch["advantages"] = torch.zeros(4, RESPONSE), torch.ones(4, RESPONSE)
    assert worker.update_actor(empty).meta_info["metrics"]["actor/num_tokens"] == 6 + 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_actor_trains_on_columns_of_any_float_dtype(models, tmp_path, dtype):
    worker, data = actor(models, tmp_path), rows()
    data.batch["old_log_probs"] = worker.compute_log_prob(data).batch["old_log_probs"].to(dtype)
    data.batch["advantages"] = torch.ones(4, RESPONSE, dtype=dtype)
    data.batch["response_mask"] = data.batch["attention_mask"][:, PROMPT:].to(dtype)
    metrics = worker.update_actor(data).meta_info["metrics"]
    assert metrics["actor/num_tokens"] == 6 + 3 + 4
    assert metrics["actor/ratio"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("name", ["old_log_probs", "advantages", "response_mask"])
def test_a_column_that_does_not_fit_the_responses_is_refused(models, tmp_path, name):
    data = rows()
    for column in ("old_log_probs", "advantages", "response_mask"):
        data.batch[column] = torch.ones(4, RESPONSE)
    data.batch[name] = torch.ones(4, 1)
    with pytest.raises(ValueError, match=rf"{name} must have the shape of responses, \[4, 6\], got \[4, 1\]"):
        actor(models, tmp_path).update_actor(data)


def test_an_actor_with_adapters_computes_the_reference_log_probs(models, tmp_path):
    config = LearnerConfig(device=Device.cpu, optimizer=CONFIG.optimizer, lora=LoraConfig(rank=4))
    worker, data = actor(models, tmp_path, config), rows()
    start = worker.compute_log_prob(data).batch["old_log_probs"]
    data.batch["old_log_probs"], data.batch["advantages"] = start, torch.ones(4, RESPONSE)
    for _ in range(3):
        worker.update_actor(data)
    moved = worker.compute_log_prob(data).batch["old_log_probs"]
    assert float((moved - start).abs().max()) > 1e-2
    reference = worker.compute_ref_log_prob(data).batch["ref_log_prob"]
    plain, _ = plain_log_probs(AutoModelForCausalLM.from_pretrained(models["causal"]).eval(), data, TEMPERATURE)
    np.testing.assert_allclose(reference.numpy(), plain, atol=2e-5)
    torch.testing.assert_close(worker.compute_log_prob(data).batch["old_log_probs"], moved, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"adapters to switch off, got none; set learner\.lora\.rank"):
        actor(models, tmp_path).compute_ref_log_prob(data)


def test_the_critic_follows_the_offload_options(models):
    config = LearnerConfig(device=Device.cpu, critic=CONFIG.critic, offload_at_transition_only=True)
    worker, data = CriticWorker(config, ALGORITHM, model_path=models["critic"], total_steps=20), rows()
    worker.init_model()
    before = worker.compute_values(data).batch["values"]
    data.batch["values"], data.batch["returns"] = before, torch.ones(4, RESPONSE)
    worker.update_critic(data)
    worker.rollout_mode(1)
    assert (worker.offload.model_offloaded, worker.offload.optimizer_offloaded) == (True, True)
    assert worker.offload.metrics["rollout_device_bytes_after"] == 0
    values = worker.compute_values(data).batch["values"]
    assert (worker.offload.model_offloaded, worker.offload.optimizer_offloaded) == (False, True)
    assert not torch.equal(values, before)
    worker.trainer_mode()
    assert (worker.offload.model_offloaded, worker.offload.optimizer_offloaded) == (False, False)
