"""Images in the learner, compared with transformers' forward of single sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from asyncrl.core.image_files import ImageReader
from asyncrl.core.images import GroupImages, PlacedImage
from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason
from learner import fsdp
from learner.config import AlgorithmConfig, Device, LearnerConfig, LoraConfig, OptimizerConfig
from learner.losses import policy_objective
from learner.packing import Packer
from learner.roles import CRITIC
from learner.trainer import Trainer
from learner.types import TokenSequence, group_sequences
from tests.support.ranks import run_on_ranks
from tests.support.vision_models import as_png, picture, write_vision_model
from tests.support.whole_weights import assert_weights_equal, weights_of


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model")


def make_groups(model_path: str) -> list[TrajectoryGroup]:
    """Return three groups. The prompts of the first two groups have equal tokens but different images.

    In one trajectory of each of these groups, a tool returns an image. The last group has only text.
    """
    reader = ImageReader(model_path=model_path, max_pixels=4096)
    images = [reader.image(as_png(picture(seed)), "image") for seed in range(3)]
    placeholder, rng = reader.token_id, np.random.default_rng(0)

    def sampled(parent: int, length: int) -> Turn:
        return Turn(
            token_ids=rng.integers(7, 40, length).astype(np.int32),
            parent=parent,
            sampled=True,
            logprobs=rng.uniform(-3, -0.5, length).astype(np.float32),
            versions=np.zeros(length, dtype=np.int32),
            finish_reason=FinishReason.stop,
        )

    groups = []
    for group_id, image in enumerate(images[:2]):
        ids = np.array([1, 12, 3, *[placeholder] * image.num_tokens, 4, 9, 2], dtype=np.int32)
        prompt = Turn.given(ids, images=(PlacedImage(image=image, offset=3),))
        shown = np.array([3, *[placeholder] * images[2].num_tokens, 4], dtype=np.int32)
        result = Turn.given(shown, parent=1, images=(PlacedImage(image=images[2], offset=1),))
        # A placeholder that the policy sampled is an ordinary token.
        odd = replace(sampled(0, 4), token_ids=np.array([11, 12, placeholder, placeholder], dtype=np.int32))
        trees = [(prompt, sampled(0, 5)), (prompt, odd), (prompt, sampled(0, 2), result, sampled(2, 4))]
        rewards = [1.0, -1.0, 0.5]
        trajectories = [Trajectory(turns=turns, reward=r) for turns, r in zip(trees, rewards, strict=True)]
        groups.append(TrajectoryGroup.from_trajectories(trajectories, group_id=group_id, attempt=0))
    text = Turn.given(np.array([1, 12, 9], dtype=np.int32))
    single = [Trajectory(turns=(text, sampled(0, 6)), reward=0.0)]
    return [*groups, TrajectoryGroup.from_trajectories(single, group_id=2, attempt=0)]


def make_sequences(model_path: str) -> list[TokenSequence]:
    advantages = iter((0.7, -1.3, 0.4, 1.1, -0.2, -0.9, 0.5))
    return [
        sequence.with_column("advantages", np.full(len(sequence.input_ids), next(advantages), dtype=np.float32))
        for group in make_groups(model_path)
        for sequence in group_sequences(group)
    ]


def plain_log_probs(model: torch.nn.Module, model_path: str, sequence: TokenSequence) -> torch.Tensor:
    """Return log-probs from transformers' forward of one sequence, one per token in the loss.

    transformers treats every placeholder token as an image. So this function replaces placeholders that the policy
    sampled by another token, and a hook restores their embeddings.
    """
    reader = ImageReader(model_path=model_path, max_pixels=4096)
    ids = torch.from_numpy(sequence.input_ids.astype(np.int64))
    seen, images, is_image = {}, sequence.images, torch.zeros(len(ids), dtype=torch.bool)
    if images is not None and images.indices.max() >= 0:
        order = list(dict.fromkeys(images.indices[images.indices >= 0].tolist()))
        is_image = torch.from_numpy(images.rows >= 0)
        pixels = np.concatenate([images.group.pixels_of(index) for index in order])
        seen = {
            "pixel_values": reader.format.features(torch.from_numpy(pixels)),
            "image_grid_thw": torch.from_numpy(images.group.grids[order][:, :3].astype(np.int64)),
            "mm_token_type_ids": is_image.int()[None],
        }
    is_sampled = (ids == reader.token_id) & ~is_image
    embedding = model.get_input_embeddings()
    handle = embedding.register_forward_hook(
        lambda module, _, out: torch.where(is_sampled[None, :, None], module.weight[reader.token_id], out)
    )
    try:
        logits = model(input_ids=torch.where(is_sampled, 0, ids)[None], **seen).logits
    finally:
        handle.remove()
    log_probs = F.log_softmax(logits[0, :-1], dim=-1)
    return log_probs.gather(-1, ids[1:, None])[:, 0][torch.from_numpy(sequence.loss_mask[1:])]


def make_trainer(model_path: str, **options: object) -> Trainer:
    config = LearnerConfig(device=Device.cpu, optimizer=OptimizerConfig(lr=1e-3, eps=1e-4), **options)
    return Trainer(config, model_path=model_path, total_updates=10)


@pytest.fixture(scope="module")
def sequences(model_path: str) -> list[TokenSequence]:
    return make_sequences(model_path)


@pytest.fixture(scope="module")
def trainer(model_path: str) -> Trainer:
    return make_trainer(model_path, max_tokens_per_micro_batch=256)


@pytest.fixture(scope="module")
def expected(model_path: str, sequences: list[TokenSequence]) -> list[np.ndarray]:
    model = AutoModelForImageTextToText.from_pretrained(model_path)
    return [plain_log_probs(model, model_path, sequence).detach().numpy() for sequence in sequences]


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("max_tokens", [256, 48])
def test_log_probs_of_images_equal_a_forward_of_single_sequences(
    trainer: Trainer, sequences: list[TokenSequence], expected: list[np.ndarray], shares: bool, max_tokens: int
) -> None:
    assert trainer.selftest is not None
    assert (trainer.selftest.packs, trainer.selftest.shares) == (True, True)
    trainer.config = replace(trainer.config, share_prompts=shares, max_tokens_per_micro_batch=max_tokens)
    found = trainer.scores(sequences)
    for sequence, own, other in zip(sequences, found, expected, strict=True):
        np.testing.assert_allclose(own[sequence.loss_mask], other, atol=2e-5)


def test_another_image_with_equal_tokens_gives_other_log_probs(expected: list[np.ndarray]) -> None:
    assert abs(expected[1] - expected[4]).max() > 0.01


def test_prompts_with_equal_tokens_are_shared_only_if_their_images_are_equal(sequences: list[TokenSequence]) -> None:
    num_prompt = len(sequences[0].input_ids) - 5
    one, other = (sequences[place].input_ids[:num_prompt].tolist() for place in (0, 3))
    assert one == other
    (batch,) = Packer(max_tokens=256, share_prompts=True).pack(sequences)
    num_shared = num_prompt - 1  # the last prompt token is not shared: each sequence has a copy
    num_own = sum(len(sequence.input_ids) - num_shared for sequence in sequences[:6])
    assert len(batch.input_ids) == 2 * num_shared + num_own + len(sequences[6].input_ids)
    assert batch.grids is not None
    assert len(batch.grids) == 4  # two images in prompts, and two images from tools
    assert batch.position_ids.shape == (3, len(batch.input_ids))


def test_a_micro_batch_contains_only_the_images_that_it_needs(sequences: list[TokenSequence]) -> None:
    (batch,) = Packer(max_tokens=256).pack(sequences[:2])
    assert batch.grids is not None
    assert batch.grids.tolist() == [[1, 2, 4]]
    (text,) = Packer(max_tokens=256).pack(sequences[6:])
    assert (text.grids, text.pixels, text.image_rows) == (None, None, None)
    assert text.position_ids.ndim == 1


def test_an_update_on_images_equals_an_update_with_transformers(
    model_path: str, sequences: list[TokenSequence]
) -> None:
    trainer = make_trainer(model_path, max_tokens_per_micro_batch=64)
    objective = policy_objective(AlgorithmConfig())
    metrics = trainer.update(
        [s.with_column("proximal_logprobs", s.columns["behavior_logprobs"]) for s in sequences], objective
    )
    model = AutoModelForImageTextToText.from_pretrained(model_path)
    total = torch.zeros(())
    for sequence in sequences:
        log_probs = plain_log_probs(model, model_path, sequence)
        before = torch.from_numpy(sequence.columns["behavior_logprobs"][sequence.loss_mask])
        ratio, advantage = (log_probs - before).exp(), float(sequence.columns["advantages"][0])
        low, high = 1 - AlgorithmConfig().clip_low, 1 + AlgorithmConfig().clip_high
        total = total - torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).sum()
    (total / sum(int(s.loss_mask.sum()) for s in sequences)).backward()
    squared = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    assert metrics["loss"] == pytest.approx(total.item() / metrics["num_tokens"], rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(squared**0.5, rel=1e-3)
    assert float(model.model.visual.patch_embed.proj.weight.grad.abs().max()) > 0


def test_a_frozen_vision_tower_does_not_change(model_path: str, sequences: list[TokenSequence]) -> None:
    trainer = make_trainer(model_path, freeze_vision=True)
    before = {name: p.detach().clone() for name, p in trainer.pretrained.named_parameters()}
    trainer.update(sequences, policy_objective(AlgorithmConfig()))
    changed = {name for name, p in trainer.pretrained.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert not any(".visual." in name for name in changed)


def test_adapters_and_critics_of_models_with_images_are_refused(model_path: str) -> None:
    with pytest.raises(ValueError, match=r"learner\.lora\.rank must be 0 .*, got 2"):
        make_trainer(model_path, lora=LoraConfig(rank=2))
    with pytest.raises(ValueError, match=r"critic .*must be a text model, got qwen3_vl"):
        CRITIC.load(model_path, torch.float32)


def test_the_image_columns_of_a_group_must_fit_its_image_grids(model_path: str) -> None:
    group = make_groups(model_path)[0]
    bad = {**group.image_columns, "pixels": group.image_columns["pixels"][:-1]}
    with pytest.raises(ValueError, match=r"prompt group 0: image column 'pixels' must be \[16, …\] uint8"):
        replace(group, image_columns=bad).check()
    assert GroupImages(group.image_columns).num_images == 2


def update_on_mesh(model_path: str, meshes: list[tuple[int, int]]) -> list[tuple[dict[str, float], dict, list]]:
    """Return a triple per mesh: the metrics of an update, the weights after it, and the log-probs before it.

    Each layer is an FSDP unit. Only the first data-parallel rank has images in all of its micro-batches.
    """
    outcomes = []
    for num_ranks, sp_size in meshes:
        fsdp.MIN_UNIT_NUMEL = 1
        trainer = make_trainer(model_path, num_ranks=num_ranks, sp_size=sp_size, max_tokens_per_micro_batch=64)
        sequences = make_sequences(model_path)
        scores = [score[s.loss_mask] for s, score in zip(sequences, trainer.scores(sequences), strict=True)]
        shares = [sequences] if num_ranks == sp_size else [sequences[:6], sequences[6:]]
        metrics = trainer.update(shares[trainer.mesh.dp_rank], policy_objective(AlgorithmConfig()))
        outcomes.append((metrics, weights_of(trainer), scores))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("sp_size", [1, 2])
def test_any_split_of_images_over_ranks_equals_one_process(
    model_path: str, sequences: list[TokenSequence], expected: list[np.ndarray], sp_size: int
) -> None:
    trainer = make_trainer(model_path, max_tokens_per_micro_batch=64)
    metrics = trainer.update(sequences, policy_objective(AlgorithmConfig()))
    for rank, outcome in enumerate(run_on_ranks(2, update_on_mesh, model_path, [(2, sp_size)], timeout_s=250.0)):
        ((found, weights, scores),) = outcome
        for own, other in zip(scores, expected, strict=True):
            np.testing.assert_allclose(own, other, atol=2e-5)
        for name in ("loss", "grad_norm", "num_tokens"):
            assert found[name] == pytest.approx(metrics[name], rel=1e-4), name
        if rank == 0:  # only rank 0 returns weights
            assert_weights_equal(weights, weights_of(trainer), atol=2e-5)
