"""Training on images in one process, with a real engine and a real learner."""

import base64
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from asyncrl.core.image_files import image_reader, prompt_images
from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.data import DataConfig, PromptStream
from asyncrl.weights.publish import WeightPublisher
from buffer.encoding import group_frames, group_of, prompt_frames, prompt_of
from learner.advantages import BatchAdvantages
from learner.config import AlgorithmConfig, Device, LearnerConfig, OptimizerConfig
from learner.losses import policy_objective
from learner.model_shards import PretrainedShards
from learner.trainer import LearnerStep, Trainer
from learner.types import group_sequences
from rollout_fleet.config import EngineDevice, RolloutFleetConfig, SamplingConfig
from rollout_fleet.engines.engine import SampleRequest
from rollout_fleet.engines.transformers import TransformersEngine
from tests.support.vision_models import COLOURS, as_png, coloured, write_vision_model

SAMPLING = SamplingConfig(max_new_tokens=1)
NUM_SAMPLES = 16
ALGORITHM = AlgorithmConfig(groups_per_step=3, samples_per_prompt=NUM_SAMPLES)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model", initializer_range=0.1)


@pytest.fixture
def stream(model_path, tmp_path):
    """Return prompts that ask for the colour of an image."""
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>which colour?"}],
            "images": [base64.b64encode(as_png(coloured(colour, seed))).decode()],
            "ground_truth": colour,
        }
        for seed in range(4)
        for colour in COLOURS
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(
        train_files=[str(path)], prompt_key="messages", images_key="images", chat_template=True, shuffle=False
    )
    reader = image_reader(model_path, max_pixels=4096)
    return PromptStream(config, AutoTokenizer.from_pretrained(model_path), seed=0, images=reader)


async def roll_out(engine, prompt, model_path, tokenizer):
    """Generate a group and score it. The reward is 1 if an answer is the letter of the image's colour."""
    prompt = prompt_of([bytes(frame) for frame in prompt_frames(prompt)])
    images = await prompt_images(image_reader(model_path, max_pixels=4096), prompt)
    requests = [
        SampleRequest(id=f"{prompt.group_id}-{i}", prompt_ids=prompt.prompt_ids, sampling=SAMPLING, images=images)
        for i in range(NUM_SAMPLES)
    ]
    samples = [output async for _, output in engine.generate(requests)]
    given = Turn.given(prompt.prompt_ids, images=images)
    trajectories = [
        Trajectory(
            turns=(given, sample.turn(parent=0)),
            reward=float(tokenizer.decode(sample.token_ids) == prompt.ground_truth),
        )
        for sample in samples
    ]
    group = TrajectoryGroup.from_trajectories(trajectories, group_id=prompt.group_id, attempt=0)
    return group_of([bytes(frame) for frame in group_frames(group)])


async def train(model_path, stream, folder, *, num_steps, lr):
    """Train for ``num_steps`` steps. Returns a pair: the mean reward per step, and the trainer."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    config = LearnerConfig(device=Device.cpu, optimizer=OptimizerConfig(lr=lr))
    trainer = Trainer(config, model_path=model_path, total_updates=num_steps)
    engine = TransformersEngine(
        RolloutFleetConfig(sampling=SAMPLING), model_path=model_path, device=EngineDevice.cpu, rank=0, seed=0
    )
    await engine.start()
    publisher = WeightPublisher(PretrainedShards.of(trainer), str(folder / "snapshots"), keep=1)
    step, rewards = LearnerStep(trainer, policy_objective(ALGORITHM)), []
    try:
        for version in range(1, num_steps + 1):
            groups = [await roll_out(engine, prompt, model_path, tokenizer) for prompt in stream.take(3)]
            sequences = [sequence for group in groups for sequence in group_sequences(group)]
            for sequence, score in zip(sequences, trainer.scores(sequences), strict=True):
                own = sequence.loss_mask
                np.testing.assert_allclose(sequence.columns["behavior_logprobs"][own], score[own], atol=5e-5)
            earned = {
                (group.group_id, sample): float(reward)
                for group in groups
                for sample, reward in enumerate(group.rewards)
            }
            sequences, _ = BatchAdvantages(ALGORITHM, trainer.mesh).assign(sequences, earned)
            assert np.isfinite(step.run(sequences)["loss"])
            rewards.append(np.mean(list(earned.values())))
            offer = publisher.publish(version).result()
            await engine.load_weights(offer)
    finally:
        publisher.close()
        await engine.stop()
    return rewards, trainer


async def test_learner_and_engine_compute_equal_log_probs_during_training_on_images(model_path, stream, tmp_path):
    before = AutoModelForImageTextToText.from_pretrained(model_path).model.visual.state_dict()
    rewards, trainer = await train(model_path, stream, tmp_path, num_steps=3, lr=0.01)
    assert len(rewards) == 3
    after = trainer.pretrained.model.visual.state_dict()
    assert any(not torch.equal(before[name], value) for name, value in after.items()) == (max(rewards) > 0)


@pytest.mark.slow
async def test_a_policy_learns_to_name_the_colour_of_an_image(model_path, stream, tmp_path):
    rewards, _ = await train(model_path, stream, tmp_path, num_steps=130, lr=0.003)
    assert np.mean(rewards[-10:]) > 0.9 > 0.3 > np.mean(rewards[:5])
