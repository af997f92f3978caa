"""A whole run whose policy learns to name the colour of an image, on the CPU."""

import base64
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from asyncrl.core.image_files import ImageReader
from asyncrl.core.trajectory import UNVERSIONED
from tests.e2e.run_checks import assert_every_token_is_accounted_for, trained_samples
from tests.support.training_run import RunningTraining
from tests.support.vision_models import COLOURS, as_png, coloured, write_vision_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 180


@pytest.fixture(scope="module")
def images():
    """Return the PNG file of each row."""
    return [as_png(coloured(colour, seed)) for seed in range(4) for colour in COLOURS]


@pytest.fixture(scope="module")
def run(tmp_path_factory, images):
    folder = tmp_path_factory.mktemp("vision")
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>which colour?"}],
            "images": [base64.b64encode(image).decode()],
            "ground_truth": [*COLOURS][number % len(COLOURS)],
        }
        for number, image in enumerate(images)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    running = RunningTraining(
        folder / "out",
        "experiment=custom",
        f"model.path={write_vision_model(folder / 'model', initializer_range=0.1)}",
        f"data.train_files=[{folder}/train.jsonl]",
        "data.chat_template=true",
        "data.prompt_key=messages",
        "data.images_key=images",
        "data.shuffle=false",
        "data.max_prompt_tokens=128",
        f"total_steps={STEPS}",
        "evaluation.enabled=false",
        "algorithm.groups_per_step=3",
        "algorithm.samples_per_prompt=16",
        "buffer.max_lag=1",
        "rollout_fleet.engine=transformers",
        "rollout_fleet.groups_in_flight=3",
        "rollout_fleet.reward=exact_match",
        "rollout_fleet.sampling.max_new_tokens=1",
        "learner.device=cpu",
        "learner.optimizer.lr=0.001",
        "learner.keep_snapshots=-1",
        "record_trajectories=true",
    )
    try:
        assert running.finish(timeout_s=500) == 0, running.output
        yield running
    finally:
        running.end()


def test_the_reward_of_a_run_on_images_rises(run):
    rewards = [record["reward"] for record in run.records]
    assert len(rewards) == STEPS
    assert np.mean(rewards[-10:]) > 0.9 > 0.3 > np.mean(rewards[:5])
    assert_every_token_is_accounted_for(run)


def test_tokens_after_images_have_the_log_prob_of_their_version(run, images):
    model_path = str(run.output_dir.parent / "model")
    reader, num_checked = ImageReader(model_path=model_path, max_pixels=4096), 0
    rows = trained_samples(run)
    for version in range(0, STEPS, 10):
        path = run.run_dir / "snapshots" / f"v{version:08d}" if version else model_path
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        for row in [row for row in rows if {*row["versions"]} - {UNVERSIONED} == {version}][::4]:
            image = reader.image(images[row["group_id"] % len(images)], "image")
            ids = torch.tensor([row["prompt_ids"]])  # the response has one token
            with torch.no_grad():
                logits = model(
                    input_ids=ids,
                    pixel_values=reader.format.features(torch.from_numpy(image.pixels)),
                    image_grid_thw=torch.tensor([image.grid]),
                    mm_token_type_ids=(ids == reader.token_id).int(),
                ).logits[0, -1]
            expected = logits.log_softmax(-1)[row["response_ids"][0]].item()
            assert row["behavior_logprobs"][0] == pytest.approx(expected, abs=1e-3)
            num_checked += 1
    assert num_checked > STEPS
