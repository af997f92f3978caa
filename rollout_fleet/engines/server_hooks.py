"""What is changed in an SGLang server of ours: how its processes start, what a pause and what an update costs.

SGLang spawns its scheduler and its detokenizer, which import everything once more: on a CPU that is half of the time
and of the work until a server is up. On a GPU they are spawned all the same, since CUDA does not survive a fork.

SGLang's own loop spins while generation is paused, also under ``--sleep-on-idle``. On a CPU that takes the core from
the server's other processes, through which every call of a weight update goes, and from a learner that has the device
while the engine stands still.

What runs through an update is a prompt that SGLang computes again, up to the last token written so far. It computes
the logits and log-probs of all written tokens with it, and discards them: of 32,000 tokens and a vocabulary of 152,000
they are 19 GB in float32. None but the last is needed.

A weight update calls `load` on each tensor-parallel rank, between two steps of the model. SGLang returns no result of
it, so each rank reports in a file.

A server leaves SIGINT and SIGTERM to its owner, which kills it: SGLang would end at them by itself.

SGLang finds `register` through the entry point that `write_plugin` puts into a folder of the server's import path. No
other server of the environment sees it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

from asyncrl.core.stop_signals import keep_stop_blocked
from asyncrl.core.types import WeightOffer

PLUGIN = "asyncrl"
"""What SGLang calls it."""
PREPARED = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""Ends with the choice of how processes start, just before they do."""
PAUSED = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
RETRACTED = "sglang.srt.managers.schedule_batch.Req.reset_for_retract"
WEIGHT_LOADER = f"{__name__}.load"
ORDER_VARIABLE = "ASYNCRL_WEIGHT_ORDER"
"""Environment variable of the server: path of the file that says which weights `load` loads."""


def write_plugin(folder: Path) -> None:
    """Make the plugin known to a server with ``folder`` on its import path."""
    installed = folder / f"{PLUGIN}_server_hooks-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}-server-hooks\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{PLUGIN} = {__name__}:register\n")


def register() -> None:
    """SGLang's entry, in each process of the server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    keep_stop_blocked()
    HookRegistry.register(PREPARED, fork_on_cpu, HookType.AFTER)
    HookRegistry.register(PAUSED, rest_while_paused, HookType.AFTER)
    HookRegistry.register(RETRACTED, skip_known_logprobs, HookType.AFTER)


def fork_on_cpu(_result: None, *_arguments: Any) -> None:
    """Have the server's processes forked, if it is a CPU's and has one thread: a lock of another would stay locked."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and len(os.listdir("/proc/self/task")) == 1:
        multiprocessing.set_start_method("fork", force=True)


def rest_while_paused(_result: None, scheduler: Any) -> None:
    """Sleep until a call comes; ranks without a socket of their own wait for the first rank's anyway."""
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.maybe_sleep()


def skip_known_logprobs(_result: None, request: Any) -> None:
    """Ask for no log-probs of what a retracted request has written; for those of its prompt where it wanted them."""
    if request.logprob_start_len >= len(request.origin_input_ids):
        request.logprob_start_len = len(request.origin_input_ids) + len(request.output_ids)


def load(model: Any, _named_tensors: Any) -> None:
    """SGLang's entry (``--custom-weight-loader``): load the offer of the order file, and report the result."""
    import torch  # with the loader, which the server's other processes do without

    from asyncrl.weights.load import load_verified

    order = Path(os.environ[ORDER_VARIABLE])
    fields = json.loads(order.read_text())
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    report: dict[str, Any] = {"order": fields["order"]}
    try:
        report["num_values"] = load_verified(model, WeightOffer(**fields["offer"]), timeout_s=fields["timeout_s"])
    except Exception as error:  # noqa: BLE001 - reported: an exception here would end the server
        report["error"] = f"{type(error).__name__}: {error}"
    partial = order.with_name(f"{order.name}.{rank}.partial")
    partial.write_text(json.dumps(report))
    partial.replace(report_path(order, rank))


def report_path(order: Path, rank: int) -> Path:
    """Where a tensor-parallel rank reports on an order to load weights."""
    return order.with_name(f"{order.name}.{rank}")
