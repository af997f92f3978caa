"""The example rows of docs/vision.md can be read, and the options on this page exist."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from transformers import AutoTokenizer

from asyncrl.core.image_files import VISION_FAMILIES, image_reader
from asyncrl.data import DataConfig, PromptStream
from learner.config import LearnerConfig
from rollout_fleet.config import RolloutFleetConfig
from tests.support.vision_models import write_vision_model

PAGE = (Path(__file__).parents[2] / "docs" / "vision.md").read_text()
SECTIONS = {"data": DataConfig, "learner": LearnerConfig, "rollout_fleet": RolloutFleetConfig}


def test_the_rows_of_the_vision_page_are_prompts(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    model_path = write_vision_model(tmp_path / "model")
    options = {"chat_template": True, "prompt_key": "messages", "images_key": "images"}
    for name, value in options.items():
        assert f"data.{name}={str(value).lower() if value is True else value}" in PAGE
    reader = image_reader(model_path, max_pixels=RolloutFleetConfig().max_image_pixels)
    config = DataConfig(train_files=["train.jsonl"], shuffle=False, **options)
    prompts = PromptStream(config, AutoTokenizer.from_pretrained(model_path), seed=0, images=reader).take(3)
    assert [prompt.ground_truth for prompt in prompts] == ["r", "g", "b"]
    assert {prompt.prompt_ids.tolist().count(reader.token_id) for prompt in prompts} == {16}


def test_the_vision_page_names_options_and_families_that_exist():
    for section, name in re.findall(r"`(data|learner|rollout_fleet)\.(\w+)", PAGE):
        assert name in {field.name for field in fields(SECTIONS[section])}, f"{section}.{name}"
    for family in VISION_FAMILIES:
        assert f"`{family}`" in PAGE
