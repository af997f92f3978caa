"""Functions that an SGLang server calls. They make starts, pauses and weight updates cheaper, and verify weights."""

from __future__ import annotations

import base64
import importlib
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.core.host import keep_stop_blocked
from asyncrl.core.images import PixelFormat
from asyncrl.core.types import WeightOffer

PLUGIN = "asyncrl"
"""Name of the SGLang plugin that adds this module to a server."""
PREPARED = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""Name of the SGLang function that chooses how the server's processes start."""
PAUSED = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
RETRACTED = "sglang.srt.managers.schedule_batch.Req.reset_for_retract"
IMAGES_READ = "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor.process_mm_data_async"
"""Name of the SGLang method that converts the images of a request to the vision tower's input."""
WEIGHT_LOADER = f"{__name__}.load"
IMAGES_VARIABLE = "ASYNCRL_IMAGES"
"""Environment variable for the server of a model with images. Other servers do not import SGLang's code for images."""
ORDER_VARIABLE = "ASYNCRL_WEIGHT_ORDER"
"""Environment variable with the path of the file that tells `load` which weights to load."""
UNUSED_KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Names of operators that SGLang's code for images looks up when it is imported, but does not call."""
KERNEL_STAND_IN = f"""\
import torch
from {__name__} import missing_kernel as __getattr__
if not torch.cuda.is_available():
    torch.cuda.synchronize = lambda device=None: None
    for name in {UNUSED_KERNELS}:
        setattr(torch.ops.sgl_kernel, name, __getattr__(name))
"""
"""Stand-in for the module ``sgl_kernel`` on a machine without SGLang's kernel package.

SGLang imports names from ``sgl_kernel`` that only speculative decoding calls. SGLang's weight checker waits for CUDA
even on a CPU, so the stand-in replaces that wait.
"""


def write_plugin(folder: Path, *, has_kernels: bool = True) -> None:
    """Write an SGLang plugin into ``folder``. The plugin loads this module in the server.

    ``folder`` must be on the server's import path. If ``has_kernels`` is false, also write a stand-in for SGLang's
    kernel package ``sgl_kernel``.
    """
    installed = folder / f"{PLUGIN}_server_hooks-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}-server-hooks\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{PLUGIN} = {__name__}:register\n")
    if not has_kernels:
        (folder / "sgl_kernel.py").write_text(KERNEL_STAND_IN)


def missing_kernel(name: str) -> Callable[..., Any]:
    """Return a function that raises `RuntimeError` if it is called, because the kernel ``name`` is not installed.

    Raises `AttributeError` for names that begin with two underscores.
    """
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} needs SGLang's kernel package, which is not installed on this machine")

    return missing


def register() -> None:
    """Make SGLang call the functions of this module. SGLang calls `register` in each process of the server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    keep_stop_blocked()
    HookRegistry.register(PREPARED, fork_on_cpu, HookType.AFTER)
    HookRegistry.register(PAUSED, rest_while_paused, HookType.AFTER)
    HookRegistry.register(RETRACTED, skip_known_logprobs, HookType.AFTER)
    if os.environ.get(IMAGES_VARIABLE):
        importlib.import_module("sgl_kernel")  # the import defines operators that SGLang needs to read images
        HookRegistry.register(IMAGES_READ, take_pixels, HookType.BEFORE)


def fork_on_cpu(_result: None, *_arguments: Any) -> None:
    """Let SGLang fork its scheduler and detokenizer on a CPU, if this process has only one thread.

    Otherwise SGLang spawns the two processes. Their imports then take half of the server's start time.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and len(os.listdir("/proc/self/task")) == 1:
        multiprocessing.set_start_method("fork", force=True)


def rest_while_paused(_result: None, scheduler: Any) -> None:
    """Let the loop of a paused scheduler sleep until a request arrives. Otherwise the loop would keep a core busy."""
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.maybe_sleep()


def skip_known_logprobs(_result: None, request: Any) -> None:
    """Keep SGLang from computing log-probs again for tokens that a paused request has already sampled.

    This does not affect requests for prompt log-probs. Without this function, SGLang would compute the logits of all
    sampled tokens again: 19 GB for 32,000 tokens and a vocabulary of 152,000.
    """
    if request.logprob_start_len >= len(request.origin_input_ids):
        request.logprob_start_len = len(request.origin_input_ids) + len(request.output_ids)


def take_pixels(processor: Any, image_data: Any = None, **_: Any) -> None:
    """Convert the pixels of a request's images from base64 text to tensors, in place.

    A client of SGLang cannot send tensors over HTTP.
    """
    import torch

    for item in image_data or ():
        if isinstance(item, dict) and "pixels" in item:
            pixels = torch.frombuffer(bytearray(base64.b64decode(item.pop("pixels"))), dtype=torch.uint8)
            form = PixelFormat.of(processor._processor.image_processor)
            item["pixel_values"] = form.features(pixels.view(-1, form.pixels_per_patch))
            item["image_grid_thw"] = torch.tensor(item.pop("grids"), dtype=torch.int64)


def load(model: Any, _named_tensors: Any) -> None:
    """Load weights into ``model`` and verify them. The file whose path is in `ORDER_VARIABLE` names the weights.

    SGLang calls this function on each tensor-parallel rank between two model steps (``--custom-weight-loader``). SGLang
    drops the result, and an exception would end the server. So each rank writes a report to the file `report_path`.
    """
    import torch

    from asyncrl.weights.load import load_verified, num_fused

    order = Path(os.environ[ORDER_VARIABLE])
    fields = json.loads(order.read_text())
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    report: dict[str, Any] = {"order": fields["order"]}
    try:
        report["num_values"] = load_verified(
            model,
            WeightOffer(**fields["offer"]),
            timeout_s=fields["timeout_s"],
            arrangement=arrangement_of_experts(model),
        )
        report["num_fused"] = num_fused(model)
    except Exception as error:  # noqa: BLE001 - an exception would end the server, so report the error
        report["error"] = f"{type(error).__name__}: {error}"
    partial = order.with_name(f"{order.name}.{rank}.partial")
    partial.write_text(json.dumps(report))
    partial.replace(report_path(order, rank))


def arrangement_of_experts(model: Any) -> str | None:
    """Return a JSON text that says which experts of a mixture-of-experts model this rank holds, and in which order.

    Returns None if SGLang does not report the order. The text may change between calls, because SGLang moves experts
    between ranks while it serves (``--enable-eplb``).
    """
    try:
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    except ImportError:
        return None
    experts = get_global_expert_location_metadata()
    places = [] if experts is None else experts.physical_to_logical_map.tolist()
    names = ("_expert_storage_rank", "moe_ep_rank", "moe_tp_rank")
    ranks = [[getattr(module, name, None) for name in names] for module in model.modules() if hasattr(module, names[0])]
    return json.dumps([places, ranks])


def report_path(order: Path, rank: int) -> Path:
    """Return the path of the file in which a tensor-parallel rank reports on a weight load.

    ``order`` is the path of the file that names the weights to load (`ORDER_VARIABLE`).
    """
    return order.with_name(f"{order.name}.{rank}")
