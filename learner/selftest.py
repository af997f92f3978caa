"""Self-test of a loaded model: compares the packed forward pass with Hugging Face's forward pass of single sequences.

The test runs before training, with the mesh, dtype and attention kernel of the run. Each decision depends on the
largest difference over all ranks, so that all ranks decide the same and enter the same collectives.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from asyncrl.core.image_files import load_processor
from asyncrl.core.images import (
    IMAGE_ROWS,
    POSITIONS,
    GroupImages,
    Image,
    PixelFormat,
    PlacedImage,
    group_columns,
)

from .fsdp import LearnerMesh, decoder_layers
from .heads import LogProbHead, PackedHead
from .lora import expert_tensors
from .packing import Packer
from .pretrained import SCORE_HEAD
from .rope import length_limit
from .types import SequenceImages, TokenSequence
from .ulysses import UlyssesShardingManager, gather_sequence

log = logging.getLogger(__name__)

LENGTHS = (23, 11, 11, 7, 3, 2)
"""Lengths of the test's sequences, in tokens. Sequences of equal length share a padded batch."""

THRESHOLDS = ("sliding_window", "attention_chunk_size")
"""Options of models that limit attention to a number of tokens. If a limit is not below the longest test sequence, the
test sets the limit to `LOWERED`."""

LOWERED = 5

SHARED_TOKENS = 6

FIRST_TOKENS = 4
"""The test also compares the mean difference over this many first tokens of each sequence. A convolution that ignores
sequence boundaries changes only these tokens."""

TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.03, torch.bfloat16: 0.12}
"""Largest accepted relative difference of hidden states from Hugging Face's forward pass, by the dtype of the run."""

LEAK_TOLERANCE = {torch.float32: 2e-4, torch.float16: 3e-3, torch.bfloat16: 0.012}
"""Largest accepted relative change of a sequence's hidden states when other sequences of the micro-batch change."""


@dataclass(frozen=True, kw_only=True)
class SelfTestResult:
    """The result of the self-test.

    Attributes:
        packs: True if sequences may share a micro-batch.
        shares: True if sequences of a micro-batch may share the tokens of their common prompt.
        difference: Mean relative difference of the last hidden states from Hugging Face's forward pass.
        seconds: Wall time of the test.
    """

    packs: bool
    shares: bool
    difference: float
    seconds: float


class SelfTest:
    """Compares the forward pass of a sharded model on packed sequences with Hugging Face's forward pass.

    ``sharding`` splits sequences over the sequence-parallel ranks. ``dtype`` is the dtype of the computation. ``name``
    is the model's path.
    """

    def __init__(
        self, head: PackedHead, mesh: LearnerMesh, sharding: UlyssesShardingManager, *, dtype: torch.dtype, name: str
    ) -> None:
        self._head, self._mesh, self._sharding, self._name = head, mesh, sharding, name
        self._tolerance, self._leak_tolerance, self._dtype = TOLERANCE[dtype], LEAK_TOLERANCE[dtype], dtype
        embeddings = cast("nn.Embedding", head.pretrained.get_input_embeddings())
        rng, self._vocabulary = np.random.default_rng(0), embeddings.num_embeddings
        self._logit_difference = 0.0
        # Draw ids from the vocabulary's upper half, because some models treat low ids (special tokens) differently.
        limit = length_limit(head.pretrained.config.get_text_config().to_dict())
        self._lengths = tuple(min(length, limit.tokens if limit else length) for length in LENGTHS)
        self._tokens = [rng.integers(self._vocabulary // 2, self._vocabulary, length) for length in self._lengths]
        self._tokens[2][:SHARED_TOKENS] = self._tokens[0][:SHARED_TOKENS]
        self._group, self._columns = self._place_images(rng) if head.vision is not None else (None, {})

    def _place_images(self, rng: np.random.Generator) -> tuple[GroupImages, dict[str, list[np.ndarray]]]:
        """Put random images into the first three sequences.

        Return the images, and a dict that maps `IMAGE_ROWS` and `POSITIONS` to one array per sequence.
        """
        processor = PixelFormat.of(load_processor(self._name))
        size = processor.merge_size

        def made(height: int, width: int) -> Image:
            pixels = rng.integers(0, 256, (height * width * size**2, processor.pixels_per_patch), dtype=np.uint8)
            return Image(pixels=pixels, grid=(1, height * size, width * size), merge_size=size, digest=f"{height}")

        common = PlacedImage(image=made(2, 2), offset=1)
        placed = [(common,), (PlacedImage(image=made(1, 2), offset=2),), (common,)]
        images = [*placed, *[()] * (len(self._lengths) - len(placed))]
        for tokens, own in zip(self._tokens, images, strict=True):
            placeholder = self._head.pretrained.config.image_token_id
            tokens[tokens == placeholder] = self._vocabulary // 2 - 1
            for each in own:
                tokens[each.offset : each.end] = placeholder
        columns, of_tokens = group_columns(self._lengths, [-1] * len(self._lengths), images)
        ends = np.cumsum(self._lengths)[:-1]
        return GroupImages(columns), {name: np.split(column, ends) for name, column in of_tokens.items()}

    def _images_of(self, tokens: Sequence[np.ndarray], places: Sequence[int]) -> Sequence[SequenceImages | None]:
        if self._group is None:
            return [None] * len(places)
        rows, positions = ([self._columns[name][place] for place in places] for name in (IMAGE_ROWS, POSITIONS))
        return SequenceImages.of(self._group, tokens, rows, positions)

    def run(self) -> SelfTestResult:
        """Run the self-test: find out whether sequences may share micro-batches and prompts. Return the result.

        The parameters do not change. `RecurrentLayers.takes_boundaries` gets the value that passes the test. Raises
        `ValueError` if hidden states are wrong even with one sequence per micro-batch, or if training and scoring
        differ. The message names the layer that differs, and a remedy.
        """
        start, training = time.perf_counter(), self._head.training
        devices = [self._mesh.device] if self._mesh.device.type == "cuda" else []
        self._head.train(False)
        try:
            pretrained = self._head.pretrained
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices),
                _lowered_thresholds(pretrained),
                _fixed_routing(pretrained),
                torch.compiler.set_stance("force_eager"),  # do not compile layers for the shapes of this test
            ):
                packs, difference = self._decide()
                shares = packs and self._shares()
        finally:
            self._head.recurrent.use(None)
            self._head.train(training)
            for unit in self._head.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()  # a forward pass leaves the root module unsharded, but the optimizer needs shards
        return SelfTestResult(packs=packs, shares=shares, difference=difference, seconds=time.perf_counter() - start)

    def _decide(self) -> tuple[bool, float]:
        """Return a pair: True if sequences may share a micro-batch, and the error of the learner's hidden states.

        The error is the relative difference from the last hidden states of Hugging Face's own forward pass.
        """
        expected = self._attempted("Hugging Face's own forward", self._plain)
        self._check_logits()
        recurrent, difference = self._head.recurrent, float("inf")
        for takes_boundaries in (True, False) if recurrent.takes_boundaries else (False,):
            recurrent.takes_boundaries = takes_boundaries
            together = self._attempted("the packed forward", self._together)
            difference, leak = self._difference(together, expected), self._leak(together)
            if difference <= self._tolerance and leak <= self._leak_tolerance:
                if recurrent.layers and self._mesh.rank == 0:
                    how = "kernels that take sequence boundaries" if takes_boundaries else "padded sequences"
                    log.info(
                        "%s: %d x %s runs on %s", self._name, len(recurrent.layers), "/".join(recurrent.types), how
                    )
                self._check_training(self._together)
                return True, difference
        alone = self._difference(self._attempted("the packed forward", self._one_by_one), expected)
        culprit = self._culprit(self._plain, self._together)
        if alone <= self._tolerance:
            self._check_training(self._one_by_one)
            log.warning(
                "%s: with %s, packed sequences affect each other; each sequence gets its own micro-batch",
                self._name,
                culprit,
            )
            return False, alone
        raise ValueError(self._refusal(culprit, difference, expected))

    def _shares(self) -> bool:
        if self._head.recurrent.layers:
            return False
        expected, found = self._together(), self._attempted("the packed forward", self._sharing)
        difference = self._difference(found, expected)
        if difference > self._leak_tolerance:
            log.warning(
                "%s: hidden states differ by %.3g (relative) if samples share the tokens of their prompt; each sample "
                "computes its own prompt",
                self._name,
                difference,
            )
        return difference <= self._leak_tolerance

    def _check_logits(self) -> None:
        difference = self._largest([torch.tensor(self._logit_difference)])
        if difference > self._tolerance:
            raise ValueError(
                self._message(
                    f"its logits differ by {difference:.3g} (relative) from those that the learner computes: "
                    f"{self._computed_logits()}"
                )
            )

    def _computed_logits(self) -> str:
        shape = cast("LogProbHead", self._head).logit_shape
        scale = f", times {shape.scale:g}" if shape.scale != 1.0 else ""
        cap = f", with a soft cap of {shape.soft_cap:g}" if shape.soft_cap is not None else ""
        return f"a linear map of the last hidden states{scale}{cap}"

    def _check_training(self, forward: Callable[[], Tensor]) -> None:
        scoring = self._attempted("the packed forward", forward)
        relative = _relative(self._attempted("the packed forward while training", self._training(forward)), scoring)
        difference = self._largest([relative.mean()])
        if difference > self._leak_tolerance:
            culprit = self._culprit(forward, self._training(forward))
            raise ValueError(
                self._message(
                    f"{culprit} computes different values in training and in scoring: hidden states differ by "
                    f"{difference:.3g} (relative), as with dropout or noise, so the trained policy would differ from "
                    "the sampling policy"
                )
            )

    def _training(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            self._head.train(True)
            try:
                return forward()
            finally:
                self._head.train(False)

        return run

    # The methods below run the model in different ways. They return hidden states [N, h] float32, sequence by sequence.

    def _plain(self) -> Tensor:
        return torch.cat(
            [
                self._through_root(lambda ids=ids, place=place: self._plain_forward(ids, place))
                for place, ids in enumerate(self._tokens)
            ]
        )

    def _plain_forward(self, tokens: np.ndarray, place: int) -> Tensor:
        pretrained, reached = self._head.pretrained, []
        output = _output_layer(self._head)
        handle = output.register_forward_pre_hook(lambda _module, args: reached.append(args[0]))
        self._head.recurrent.use(None)
        try:
            with _eager(pretrained):
                ids = torch.from_numpy(tokens).to(self._mesh.device).unsqueeze(0)
                logits = pretrained(input_ids=ids, use_cache=False, **self._plain_images(place)).logits
        finally:
            handle.remove()
        if not reached:
            raise RuntimeError(f"{type(pretrained).__name__} does not call its output layer")
        if isinstance(self._head, LogProbHead):
            ours = self._head.logit_shape(F.linear(reached[0], output.weight, output.bias).float())
            self._logit_difference = max(self._logit_difference, float(_relative(ours[0], logits[0].float()).max()))
        return reached[0][0].float()

    def _plain_images(self, place: int) -> dict[str, Tensor]:
        if self._group is None or self._head.vision is None or self._columns[IMAGE_ROWS][place].max() < 0:
            return {}
        rows, device = self._columns[IMAGE_ROWS][place], self._mesh.device
        (placed,) = self._group.placed(rows)
        pixels = torch.from_numpy(placed.image.pixels).to(device)
        return {
            "pixel_values": self._head.vision.features(pixels),
            "image_grid_thw": torch.tensor([placed.image.grid], device=device),
            "mm_token_type_ids": torch.from_numpy((rows >= 0).astype(np.int32)).to(device)[None],
        }

    def _together(self, *, changed: bool = False) -> Tensor:
        """Run all sequences in one micro-batch, and return the hidden states.

        With ``changed``, every second sequence gets other tokens, to find out whether the hidden states of the other
        sequences change.
        """
        middle = self._vocabulary // 2
        tokens = [
            middle + (ids - middle + 1) % (self._vocabulary - middle) if changed and index % 2 == 0 else ids
            for index, ids in enumerate(self._tokens)
        ]
        if self._group is not None:
            rows = self._columns[IMAGE_ROWS]
            tokens = [np.where(own < 0, ids, old) for own, ids, old in zip(rows, tokens, self._tokens, strict=True)]
        return self._through_root(lambda: self._packed_forward(tokens))

    def _one_by_one(self) -> Tensor:
        return torch.cat(
            [
                self._through_root(lambda ids=ids, place=place: self._packed_forward([ids], [place]))
                for place, ids in enumerate(self._tokens)
            ]
        )

    def _sharing(self) -> Tensor:
        return self._through_root(lambda: self._packed_forward(self._tokens, num_prompt=SHARED_TOKENS + 1))

    def _packed_forward(
        self, tokens: Sequence[np.ndarray], places: Sequence[int] = (), *, num_prompt: int = 1
    ) -> Tensor:
        images = self._images_of(tokens, places or range(len(tokens)))
        sequences = [
            TokenSequence(input_ids=ids.astype(np.int32), loss_mask=np.arange(len(ids)) >= num_prompt, images=own)
            for ids, own in zip(tokens, images, strict=True)
        ]
        (batch,) = Packer(max_tokens=sum(map(len, tokens)), share_prompts=num_prompt > 1).pack(sequences)
        batch = batch.to(self._mesh.device)
        with self._sharding:
            hidden = gather_sequence(self._head.hidden_states(batch), dim=0)
        return (hidden[: len(batch.input_ids)] if batch.token_index is None else hidden[batch.token_index]).float()

    def _through_root(self, function: Callable[[], Tensor]) -> Tensor:
        """Call a function inside the forward pass of the root module, so that FSDP gathers the parameters."""
        self._head.forward = function  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return self._head()
        finally:
            del self._head.forward

    def _attempted(self, what: str, forward: Callable[[], Tensor]) -> Tensor:
        try:
            return forward()
        except Exception as error:
            place = _raised_in(error)
            raise ValueError(self._message(f"{what} raises in {place}: {type(error).__name__}: {error}")) from error

    # The methods below compare hidden states.

    def _difference(self, found: Tensor, expected: Tensor) -> float:
        """Return the larger of two mean relative differences: at all tokens, and at each sequence's first tokens."""
        if found.shape != expected.shape:
            raise ValueError(
                self._message(
                    f"its output layer takes {expected.shape[-1]} values per token, but its last hidden states have "
                    f"{found.shape[-1]}: the model has a layer between them that the learner does not compute"
                )
            )
        relative = _relative(found, expected)
        return self._largest([relative[self._places() < FIRST_TOKENS].mean(), relative.mean()])

    def _places(self) -> Tensor:
        return torch.cat([torch.arange(length) for length in self._lengths])

    def _leak(self, together: Tensor) -> float:
        relative = _relative(self._together(changed=True), together)
        sequence = torch.arange(len(self._lengths)).repeat_interleave(torch.tensor(self._lengths))
        same, first = sequence % 2 == 1, self._places() < FIRST_TOKENS
        return self._largest([relative[same & first].mean(), relative[same].mean()])

    def _largest(self, differences: list[Tensor]) -> float:
        """Return the largest difference over all ranks; NaN counts as infinite."""
        worst = torch.stack(differences).max().nan_to_num(nan=torch.inf)
        return float(self._mesh.largest(worst))

    def _culprit(self, right: Callable[[], Tensor], wrong: Callable[[], Tensor]) -> str:
        expected = self._outputs(right, gathered=right != self._plain)
        found = self._outputs(wrong, gathered=True)
        for name, (kind, output) in found.items():
            other = expected.get(name)
            if other is None or other[1].shape != output.shape:
                continue
            if self._difference(output, other[1]) > self._tolerance:
                return f"{kind} ({name})"
        return type(self._head.pretrained).__name__

    def _outputs(self, run: Callable[[], Tensor], *, gathered: bool) -> dict[str, tuple[str, Tensor]]:
        outputs: dict[str, tuple[str, list[Tensor]]] = {}
        names = {module: name for name, module in self._head.pretrained.named_modules()}

        def keep(module: nn.Module, _args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor) and tensor.ndim == 3 and len(tensor) == 1:
                if gathered:
                    with self._sharding:
                        tensor = gather_sequence(tensor, dim=1)
                kept = outputs.setdefault(names[module], (type(module).__name__, []))[1]
                kept.append(tensor[0].float())

        layers = decoder_layers(self._head.pretrained)
        parts = [part for layer in layers for part in (*layer.children(), layer)]
        handles = [part.register_forward_hook(keep) for part in parts]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        num_tokens = sum(self._lengths)
        return {name: (kind, torch.cat(tensors)[:num_tokens]) for name, (kind, tensors) in outputs.items()}

    # The methods below make error messages.

    def _refusal(self, culprit: str, difference: float, expected: Tensor) -> str:
        remedy = "the learner does not support this layer"
        if self._mesh.sp_size > 1:
            self._sharding = nullcontext()
            if self._difference(self._one_by_one(), expected) <= self._tolerance:
                remedy = "it is correct without sequence parallelism: set learner.sp_size=1"
        return self._message(
            f"{culprit} computes different values for packed sequences and for single sequences: hidden states differ "
            f"by {difference:.3g} (relative), expected at most {self._tolerance:g} with {self._dtype}; {remedy}"
        )

    def _message(self, what: str) -> str:
        return (
            f"the learner cannot train {type(self._head.pretrained).__name__} from {self._name!r} with "
            f"sp_size={self._mesh.sp_size}: {what}. To train it anyway, set learner.skip_selftest to a reason"
        )


def _output_layer(head: PackedHead) -> nn.Linear:
    if isinstance(head, LogProbHead):
        return cast("nn.Linear", head.pretrained.get_output_embeddings())
    return cast("nn.Linear", getattr(head.pretrained, SCORE_HEAD))


def _relative(found: Tensor, expected: Tensor) -> Tensor:
    norms = expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((found - expected).norm(dim=-1) / norms).cpu()


@contextmanager
def _lowered_thresholds(pretrained: PreTrainedModel) -> Iterator[None]:
    """Reduce the sizes of attention windows and attention chunks to `LOWERED`, and restore the sizes on exit.

    Sizes below the longest test sequence do not change. Without this reduction, the test would need sequences of
    thousands of tokens.
    """
    modules = list(pretrained.modules())
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    changed: list[tuple[Any, str, int]] = []
    for holder in (*configs.values(), *modules):
        for name in THRESHOLDS:
            value = vars(holder).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= max(LENGTHS):
                changed.append((holder, name, value))
                setattr(holder, name, LOWERED)
    try:
        yield
    finally:
        for holder, name, value in changed:
            setattr(holder, name, value)


class _FirstExperts(TorchDispatchMode):
    """While this mode is active, each ``topk`` over the last dimension returns the first entries, not the largest."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default or (args[2] if len(args) > 2 else -1) not in (-1, args[0].ndim - 1):
            return out
        chosen = torch.arange(args[1], device=out[1].device).expand_as(out[1])
        return args[0].gather(-1, chosen), chosen


@contextmanager
def _fixed_routing(pretrained: PreTrainedModel) -> Iterator[None]:
    """Route all tokens of a mixture of experts to the first experts.

    Otherwise, rounding in half precision could select other experts in the packed forward pass than in Hugging Face's
    forward pass. The hidden states would then differ, although both forward passes are correct.
    """
    parts = dict(pretrained.named_modules())
    experts = {name.rpartition(".")[0] for name in expert_tensors(pretrained)}
    blocks = [parts[name.rpartition(".")[0]] for name in experts]
    routing, handles = _FirstExperts(), []
    for block in blocks:
        handles.append(block.register_forward_pre_hook(lambda *_: routing.__enter__() and None))
        handles.append(block.register_forward_hook(lambda *_: routing.__exit__(None, None, None), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _eager(pretrained: PreTrainedModel) -> Iterator[None]:
    # transformers' `set_attn_implementation` does not change models whose attention is not in the registry.
    configs = {
        id(module.config): module.config for module in pretrained.modules() if isinstance(module, PreTrainedModel)
    }
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation_internal = "eager"
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def _raised_in(error: BaseException) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_locals.get("self", frame.f_locals.get("module")) for frame in frames]
    named = [type(module).__name__ for module in modules if isinstance(module, nn.Module)]
    return named[-1] if named else frames[-1].f_code.co_name
