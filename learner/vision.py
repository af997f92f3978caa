"""Runs the vision tower of Qwen3-VL on the images in packed sequences, and puts its features at image placeholders.

Each image of a micro-batch goes through the tower once, for all sequences that contain it. Under sequence parallelism,
each rank runs the tower on all images and uses the features of its own tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.core.image_files import VISION_FAMILIES, load_processor
from asyncrl.core.images import PixelFormat

from .packing import MicroBatch
from .ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor


class VisionTower:
    """The vision tower (image encoder) of a model. It makes the language model's inputs from tokens and images.

    Args:
        model: Qwen3-VL without its output layer.
        pixel_format: Describes how images are cut into patches, and how pixels are scaled to the tower's input.
    """

    def __init__(self, model: nn.Module, pixel_format: PixelFormat) -> None:
        self._model = cast("Any", model)
        self._format = pixel_format

    @property
    def language_model(self) -> nn.Module:
        """The decoder of Qwen3-VL."""
        return self._model.language_model

    def features(self, pixels: Tensor) -> Tensor:
        """Convert the pixels of images, [P, …] uint8 with one patch per row, to the tower's input, [P, …] float32."""
        return self._format.features(pixels)

    def freeze(self) -> None:
        """Freeze the weights of the vision tower, including its layers that merge patches."""
        self._model.visual.requires_grad_(False)

    def inputs(self, batch: MicroBatch, input_ids: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of the language model for this rank's tokens ``input_ids``, [1, n] int64.

        At image placeholders, the embeddings are the tower's features. A micro-batch without images runs the tower on a
        blank image, because all ranks must take part in gathering the tower's sharded parameters.
        """
        embedded = self._model.get_input_embeddings()(input_ids)
        rows, pixels, grids = batch.image_rows, batch.pixels, batch.grids
        if rows is None or pixels is None or grids is None:
            size = self._format.merge_size
            pixels = torch.zeros(size**2, self._format.pixels_per_patch, dtype=torch.uint8, device=input_ids.device)
            grids = torch.tensor([[1, size, size]], device=input_ids.device)
            rows = torch.full((len(batch.input_ids),), -1, device=input_ids.device)
        if (sp_size := get_ulysses_sequence_parallel_world_size()) > 1:
            rows = slice_input_tensor(F.pad(rows, (0, -len(rows) % sp_size), value=-1), dim=0, padding=False)
        seen = self._model.visual(self.features(pixels), grid_thw=grids, return_dict=True)
        places = (rows >= 0).nonzero()[:, 0]
        own = rows[places]
        merged = seen.pooler_output.index_select(0, own).to(embedded.dtype)
        return {
            "inputs_embeds": embedded[0].index_put((places,), merged)[None],
            "visual_pos_masks": (rows >= 0)[None],
            "deepstack_visual_embeds": [each.index_select(0, own) for each in seen.deepstack_features],
        }


def vision_tower(pretrained: PreTrainedModel, model_path: str) -> VisionTower | None:
    """Return the vision tower of a model that was built from the folder ``model_path``; None for a text model."""
    if not has_vision(pretrained):
        return None
    return VisionTower(cast("nn.Module", pretrained.base_model), PixelFormat.of(load_processor(model_path)))


def has_vision(pretrained: PreTrainedModel) -> bool:
    """Return whether asyncrl supports images for a model's family."""
    return pretrained.config.model_type in VISION_FAMILIES
