"""Reads images in chat messages and dataset rows, and converts them to `Image` objects.

An image is a data URL, base64 text, or the bytes of a file. Dataset rows can also name a path.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .images import Image, PixelFormat, PlacedImage, digest_of_pixels
from .types import Prompt

IMAGE_PARTS = ("image", "image_url", "input_image")
"""Values of ``type`` that mark an image in a chat message, in the APIs of OpenAI, Anthropic and Hugging Face."""

VISION_FAMILIES = ("qwen3_vl", "qwen3_vl_moe")
"""``model_type`` of the vision-language models that the learner can train."""

MAX_SOURCE_PIXELS = 1 << 26
"""Largest number of pixels (height times width) of an image file, checked before the file is decoded."""

MAX_ASPECT_RATIO = 200
"""Largest ratio of an image's longer side to its shorter side that the model's image processor accepts."""


def is_image(part: Any) -> bool:
    """Return whether ``part``, one entry of a message's ``content`` list, holds an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def source_of(part: Mapping[str, Any]) -> Any:
    """Return the image that a content part of a message holds: bytes, a path, a URL, base64 text, or a dict of these.

    Returns None if the part names no image. The image is not read or decoded.
    """
    url, source = part.get("image_url"), part.get("source")
    if isinstance(url, Mapping):
        return url.get("url")
    if isinstance(source, Mapping):
        return source.get("data") if source.get("type") == "base64" else source.get("url")
    return next((part[key] for key in ("image_url", "image", "url", "path") if part.get(key) is not None), None)


def image_part(content: bytes) -> dict[str, Any]:
    """Return a message's content part in OpenAI's format (an ``image_url`` dict) that holds an image as a data URL.

    ``content`` is the bytes of an image file.
    """
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(content)) as opened:
        kind = Pillow.MIME.get(opened.format or "", "image/png")
    url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def read_bytes(source: Any, where: str, *, from_files: bool = False) -> bytes:
    """Return the bytes of an image file. If ``source`` is a path, read the file.

    The arguments and the errors are those of `content_of`.
    """
    content = content_of(source, where, from_files=from_files)
    return content.read_bytes() if isinstance(content, Path) else content


def content_of(source: Any, where: str, *, from_files: bool = False) -> bytes | Path:
    """Return the content of an image file as bytes. If ``source`` is a path, return the path and do not read the file.

    Args:
        source: A data URL, base64 text, bytes, or a mapping with ``bytes`` or ``path``.
        where: Name of the image in error messages.
        from_files: Whether ``source`` may also be a ``file://`` URL or a path, relative to the current directory.

    Raises:
        ValueError: the source has another form.
    """
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    expected = "a data URL, base64 text or bytes" + (", or the path of a file" if from_files else "")
    if not isinstance(source, str):
        raise ValueError(f"{where} is {_short(source)}, expected {expected}")
    if source.startswith(("http://", "https://")):
        raise ValueError(f"{where} is the address {_short(source)}, expected {expected}; download the image first")
    if from_files and (path := _path_in(source)) is not None:
        return path
    text = source.partition(",")[2] if source.startswith("data:") else source
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        missing = "; no such file exists" if from_files and len(source) < 1024 else ""
        raise ValueError(f"{where} is {_short(source)}, expected {expected}{missing}") from error


def _path_in(source: str) -> Path | None:
    """Return the path of the file that ``source`` names; None if there is no such file.

    ``source`` is a path or a ``file://`` URL.
    """
    path = source.removeprefix("file://")
    if len(path) > 4096 or path.startswith("data:"):
        return None
    file = Path(path).expanduser()
    return file if file.is_file() else None


def is_vision_model(model_path: str) -> bool:
    """Return whether the learner can train the vision tower of the model in the folder ``model_path``.

    The result depends on the model type in the folder's ``config.json``. If this file is missing, the result is False.
    """
    file = Path(model_path, "config.json")
    return file.is_file() and json.loads(file.read_text()).get("model_type") in VISION_FAMILIES


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """Converts image files to `Image` objects for one model.

    Attributes:
        model_path: The model's folder, with the settings of its image processor.
        max_pixels: Largest number of pixels of a resized image. The model's own limit also applies.

    Raises:
        ValueError: the image processor is not Qwen's, or ``max_pixels`` is too small. The first use raises the error.
    """

    model_path: str
    max_pixels: int

    @cached_property
    def token_id(self) -> int:
        """Id of the model's placeholder token for images."""
        return placeholder_ids(self.model_path)[0]

    @cached_property
    def format(self) -> PixelFormat:
        """The sizes and factors by which the model's image processor cuts an image into patches and scales pixels."""
        return PixelFormat.of(self._processor)

    @cached_property
    def _processor(self) -> Any:
        return load_processor(self.model_path)

    @property
    def _limits(self) -> dict[str, int]:
        size = self._processor.size
        shortest, longest = (size[key] for key in ("shortest_edge", "longest_edge"))
        if self.max_pixels < shortest:
            raise ValueError(
                f"rollout_fleet.max_image_pixels must be at least {shortest}, the smallest image size of "
                f"{self.model_path!r}, got {self.max_pixels}"
            )
        return {"shortest_edge": shortest, "longest_edge": min(longest, self.max_pixels)}

    def num_tokens(self, content: bytes | Path, where: str) -> int:
        """Return the number of placeholder tokens that an image needs in a prompt. Reads only the file's header.

        ``content`` is the file's bytes or path. ``where`` names the image in error messages. Raises `ValueError` if
        Pillow cannot read the header, or the image is too large or too narrow.
        """
        width, height = _size(content, where)
        limits = self._limits
        options = {"min_pixels": limits["shortest_edge"], "max_pixels": limits["longest_edge"]}
        num_patches = self._processor.get_number_of_image_patches(height, width, options)
        return num_patches // self.format.merge_size**2

    def image(self, content: bytes, where: str) -> Image:
        """Decode an image file, resize it within the limits and cut it into patches.

        ``content`` is the bytes of the file. ``where`` names the image in error messages.

        Raises:
            ValueError: Pillow cannot read the bytes as an image, or the image is too large or too narrow.
        """
        from PIL import Image as Pillow

        _size(content, where)
        try:
            with Pillow.open(io.BytesIO(content)) as opened:
                rgb = opened.convert("RGB")
        except OSError as error:
            raise ValueError(f"{where} cannot be decoded ({error}), expected a complete image file") from error
        made = self._processor(rgb, do_rescale=False, do_normalize=False, size=self._limits, return_tensors="np")
        form, (grid,) = self.format, made["image_grid_thw"].tolist()
        frames = np.asarray(made["pixel_values"]).reshape(-1, 3, form.temporal_patch_size, form.patch_size**2)
        pixels = np.ascontiguousarray(frames[:, :, 0].reshape(len(frames), -1), dtype=np.uint8)
        time, height, width = grid
        return Image(
            pixels=pixels,
            grid=(time, height, width),
            merge_size=form.merge_size,
            digest=digest_of_pixels(pixels, grid),
        )

    def images_in(self, messages: Sequence[Mapping[str, Any]]) -> list[Image]:
        """Decode all images in chat messages of OpenAI's format, in the order of the messages.

        Raises the errors of `image`.
        """
        return [self.image(read_bytes(source, where), where) for source, where in sources_in(messages)]

    def placed(self, token_ids: np.ndarray, images: Sequence[Image], where: str) -> tuple[PlacedImage, ...]:
        """Find the placeholder tokens of each image in ``token_ids``, [T] ints.

        Returns each image with the index of the image's first placeholder token. Raises the errors of `place_images`.
        """
        return place_images(token_ids, images, self.token_id, where)


def image_reader(model_path: str, *, max_pixels: int) -> ImageReader | None:
    """Return an `ImageReader` for the model in a folder, or None if the learner cannot train the model's vision tower.

    ``max_pixels`` is the largest number of pixels of a resized image.
    """
    return ImageReader(model_path=model_path, max_pixels=max_pixels) if is_vision_model(model_path) else None


async def prompt_images(reader: ImageReader | None, prompt: Prompt) -> tuple[PlacedImage, ...]:
    """Decode the images of a prompt in a thread, and find the placeholder tokens of each image.

    Returns each image with the index of the image's first placeholder token in the prompt. The result is empty if
    ``reader`` is None or the prompt has no images.

    Raises:
        ValueError: an image cannot be decoded, or the prompt's placeholder tokens do not match the images. The message
            names the prompt group.
    """
    if reader is None or next(sources_in(prompt.messages), None) is None:
        return ()
    where = f"prompt group {prompt.group_id}"
    try:
        images = await asyncio.to_thread(reader.images_in, prompt.messages)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return reader.placed(prompt.prompt_ids, images, where)


def sources_in(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, str]]:
    """Yield a pair for each image in chat messages: the result of `source_of`, and a name for error messages.

    Example of a name: ``messages[0].content[2]``.
    """
    for number, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list | tuple) else ()):
            if is_image(part):
                yield source_of(part), f"messages[{number}].content[{place}]"


def place_images(token_ids: np.ndarray, images: Sequence[Image], token_id: int, where: str) -> tuple[PlacedImage, ...]:
    """Find the placeholder tokens of each image in a sequence of token ids.

    The placeholder tokens of an image must be adjacent. Returns each image with the index of the image's first
    placeholder token, in the order of ``images``. ``token_id`` is the id of the placeholder. ``where`` names
    ``token_ids`` in error messages.

    Raises:
        ValueError: the placeholders do not match the images.
    """
    places = np.flatnonzero(np.asarray(token_ids) == token_id)
    needed = sum(image.num_tokens for image in images)
    if len(places) != needed:
        raise ValueError(
            f"{where}: {len(images)} images need {needed} placeholder tokens (id {token_id}), got {len(places)}; if "
            "the text contains the placeholder token, remove this token from the text"
        )
    placed, done = [], 0
    for image in images:
        own = places[done : done + image.num_tokens]
        if own[-1] - own[0] + 1 != len(own):
            raise ValueError(f"{where}: the placeholders of an image must be adjacent, got indices {own.tolist()[:8]}")
        placed.append(PlacedImage(image=image, offset=int(own[0])))
        done += len(own)
    return tuple(placed)


def with_placeholders(token_ids: Sequence[int], counts: Sequence[int], token_id: int, where: str) -> list[int]:
    """Return a copy of ``token_ids`` in which each image has its full number of placeholder tokens.

    In ``token_ids``, each image has one placeholder, the token ``token_id``. ``counts`` has the number of placeholders
    that each image needs. ``where`` names ``token_ids`` in error messages.

    Raises:
        ValueError: the number of placeholders is not the number of images.
    """
    found = sum(token == token_id for token in token_ids)
    if found != len(counts):
        raise ValueError(
            f"{where} has {found} image placeholders (token {token_id}) for {len(counts)} images, expected one per "
            "image; the chat template must write one per image part, and text must not contain the placeholder"
        )
    left = iter(counts)
    return [copy for token in token_ids for copy in ([token] * next(left) if token == token_id else [token])]


def placeholder_ids(model_path: str) -> tuple[int, int]:
    """Return a pair of token ids from a model's ``config.json``: the placeholders of images and of videos."""
    settings = json.loads(Path(model_path, "config.json").read_text())
    return settings["image_token_id"], settings["video_token_id"]


def load_processor(model_path: str) -> Any:
    """Load the image processor of the model in a folder. The processor must be transformers' class for Qwen models.

    The function loads the variant of this class that uses Pillow and numpy, not torch.

    Raises:
        ValueError: the image processor is of another class, or cannot be loaded.
    """
    from transformers import AutoImageProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    try:
        processor = AutoImageProcessor.from_pretrained(model_path, backend="pil")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model_path!r} must hold the settings of its image processor, preprocessor_config.json ({error}); copy "
            "it from the original model"
        ) from error
    if not isinstance(processor, Qwen2VLImageProcessorPil):
        raise ValueError(
            f"{model_path!r} has the image processor {type(processor).__name__}, expected Qwen2VLImageProcessor; "
            f"images work with the families {', '.join(VISION_FAMILIES)}"
        )
    return processor


def _size(content: bytes | Path, where: str) -> tuple[int, int]:
    """Return a pair: the width and the height of an image, in pixels. Reads only the header of the image file."""
    from PIL import Image as Pillow

    try:
        with Pillow.open(content if isinstance(content, Path) else io.BytesIO(content)) as opened:
            width, height = opened.size
    except (OSError, Pillow.DecompressionBombError) as error:
        what = f"the file {content}, which is" if isinstance(content, Path) else f"{len(content)} bytes, which are"
        raise ValueError(f"{where} is {what} not an image ({error}), expected a file such as PNG or JPEG") from error
    if width * height > MAX_SOURCE_PIXELS:
        raise ValueError(
            f"{where} has {width} × {height} pixels, expected at most {MAX_SOURCE_PIXELS}; shrink the image"
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(
            f"{where} has {width} × {height} pixels, expected an aspect ratio of at most {MAX_ASPECT_RATIO}; crop the "
            "image"
        )
    return width, height


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"
