"""Images of trajectory groups: position ids on three axes, one copy per group, and the model's image processor."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.core.image_files import ImageReader, image_part, place_images, read_bytes, with_placeholders
from asyncrl.core.images import Image, PlacedImage, positions_of
from asyncrl.core.trajectory import ROOT, Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason
from tests.support.vision_models import as_png, picture, write_vision_model


def image(height: int = 2, width: int = 2, *, value: int = 7) -> Image:
    """Return an image of height × width patches, with a merge size of 2."""
    pixels = np.full((height * width, 12), value, dtype=np.uint8)
    return Image(pixels=pixels, grid=(1, height, width), merge_size=2, digest=f"{value} {height} {width}")


def given(*token_ids: int, parent: int = ROOT, **images: Image) -> Turn:
    """Return a given turn (tokens that were not sampled) with images.

    The keyword of an image names the position of the image. Example: ``p3=image()`` puts an image at token 3.
    """
    placed = tuple(PlacedImage(image=each, offset=int(name[1:])) for name, each in images.items())
    return Turn.given(np.array(token_ids, dtype=np.int32), parent=parent, images=placed)


def sampled(*token_ids: int, parent: int) -> Turn:
    return Turn(
        token_ids=np.array(token_ids, dtype=np.int32),
        parent=parent,
        sampled=True,
        logprobs=np.full(len(token_ids), -0.5, dtype=np.float32),
        versions=np.zeros(len(token_ids), dtype=np.int32),
        finish_reason=FinishReason.stop,
    )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ImageReader:
    return ImageReader(model_path=write_vision_model(tmp_path_factory.mktemp("model")), max_pixels=4096)


def test_positions_of_an_image_follow_its_grid() -> None:
    positions, end = positions_of(5, 8, [PlacedImage(image=image(4, 6), offset=1)])
    assert positions.T.tolist() == [
        [5, 6, 6, 6, 6, 6, 6, 9],
        [5, 6, 6, 6, 7, 7, 7, 9],
        [5, 6, 7, 8, 6, 7, 8, 9],
    ]
    assert end == 10


def test_a_group_stores_an_image_once_and_gives_each_token_its_row() -> None:
    prompt = given(1, 2, 2, 3, p1=image(2, 4))
    tree = Trajectory(
        turns=(prompt, sampled(4, parent=0), given(2, 5, parent=1, p0=image(2, 2, value=9)), sampled(6, parent=2)),
        reward=1.0,
    )
    again = Trajectory(turns=(prompt, sampled(4, parent=0), given(2, 2, parent=1, p0=image(2, 4))), reward=0.0)
    group = TrajectoryGroup.from_trajectories([tree, again], group_id=3, attempt=0)
    assert group.image_columns["grids"].tolist() == [[1, 2, 4, 2], [1, 2, 2, 2]]
    assert group.image_columns["pixels"].shape == (8 + 4, 12)
    assert group.token_columns["image_rows"].tolist() == [-1, 0, 1, -1, -1, 2, -1, -1, -1, 0, 1]
    positions = group.token_columns["positions"]
    assert positions[:, 0].tolist() == [0, 1, 1, 3, 4, 5, 6, 7, 4, 5, 5]
    assert positions[:, 2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6]
    for before, after in zip([tree, again], group.trajectories(), strict=True):
        for own, other in zip(before.turns, after.turns, strict=True):
            assert [(p.offset, p.image.pixels.tolist()) for p in own.images] == [
                (p.offset, p.image.pixels.tolist()) for p in other.images
            ]


def test_all_prompts_of_a_group_must_have_the_same_images() -> None:
    one = Trajectory(turns=(given(1, 2, p1=image(value=1)), sampled(4, parent=0)), reward=1.0)
    other = Trajectory(turns=(given(1, 2, p1=image(value=2)), sampled(4, parent=0)), reward=1.0)
    with pytest.raises(ValueError, match=r"trajectory 1 of prompt group 3 must begin"):
        TrajectoryGroup.from_trajectories([one, other], group_id=3, attempt=0)


def test_features_of_an_image_equal_those_of_the_models_processor(reader: ImageReader) -> None:
    from PIL import Image as Pillow
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = picture(width=30, height=20)
    own = reader.image(as_png(pixels), "image")
    expected = Qwen2VLImageProcessorPil.from_pretrained(reader.model_path)(
        Pillow.fromarray(pixels), return_tensors="pt"
    )
    assert [list(own.grid)] == expected["image_grid_thw"].tolist() == [[1, 4, 8]]
    torch.testing.assert_close(reader.format.features(torch.from_numpy(own.pixels)), expected["pixel_values"])
    assert own.num_tokens == reader.num_tokens(as_png(pixels), "image") == 8


def test_each_form_of_an_image_is_read_as_the_same_bytes(tmp_path: Path) -> None:
    png = as_png(picture())
    (tmp_path / "a.png").write_bytes(png)
    encoded = base64.b64encode(png).decode()
    forms = (
        *(png, encoded, f"data:image/png;base64,{encoded}", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png"),
        *({"bytes": png, "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}),
        image_part(png)["image_url"]["url"],
    )
    for form in forms:
        assert read_bytes(form, "image", from_files=True) == png


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.com/a.png", "is the address .* download the image first"),
        ("nowhere.png", "is 'nowhere.png' .* expected a data URL, base64 text or bytes"),
        (7, r"is 7 \(int\), expected"),
    ],
)
def test_the_error_for_an_invalid_source_of_an_image_contains_the_source(source: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"row 3: image 0 {message}"):
        read_bytes(source, "row 3: image 0")


def test_no_image_file_is_read_without_permission(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(as_png(picture()))
    with pytest.raises(ValueError, match="expected a data URL, base64 text or bytes"):
        read_bytes(str(tmp_path / "a.png"), "messages[0]")


def test_the_error_for_an_invalid_image_names_the_image(reader: ImageReader) -> None:
    for content, message in (
        (b"no image", "image 2 is 8 bytes, which are not an image"),
        (as_png(picture())[:-30], "image 2 cannot be decoded"),
        (as_png(picture(width=410, height=2)), "image 2 has 410 × 2 pixels, expected an aspect ratio of at most 200"),
    ):
        with pytest.raises(ValueError, match=message):
            reader.image(content, "image 2")


def test_an_image_is_resized_to_the_limit_of_the_run(reader: ImageReader) -> None:
    small = ImageReader(model_path=reader.model_path, max_pixels=256)
    content = as_png(picture(width=64, height=32))
    assert (reader.num_tokens(content, "image"), small.num_tokens(content, "image")) == (32, 2)
    assert small.image(content, "image").grid == (1, 2, 4)
    with pytest.raises(ValueError, match=r"rollout_fleet\.max_image_pixels must be at least 64, .* got 63"):
        ImageReader(model_path=reader.model_path, max_pixels=63).image(content, "image")


def test_placeholders_are_repeated_and_matched_with_their_images() -> None:
    assert with_placeholders([1, 9, 2, 9], [2, 1], 9, "row 0") == [1, 9, 9, 2, 9]
    placed = place_images(np.array([1, 9, 9, 2, 9]), [image(2, 4), image()], 9, "row 0")
    assert [(each.offset, each.end) for each in placed] == [(1, 3), (4, 5)]
    with pytest.raises(ValueError, match=r"row 0 has 1 image placeholders \(token 9\) for 2 images"):
        with_placeholders([1, 9], [2, 1], 9, "row 0")
    with pytest.raises(ValueError, match="2 images need 3 placeholder tokens"):
        place_images(np.array([1, 9, 9]), [image(2, 4), image()], 9, "row 0")
