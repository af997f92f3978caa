"""What is changed in an SGLang server of ours: a scheduler that stands still sleeps until it is asked something.

SGLang's own loop spins while generation is paused, also under ``--sleep-on-idle``. On a CPU that takes the core from
the server's other processes, through which every call of a weight update goes, and from a learner that has the device
while the engine stands still.

SGLang finds `register` through the entry point that `write_plugin` puts into a folder of the server's import path. No
other server of the environment sees it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PLUGIN = "asyncrl"
"""What SGLang calls it."""
PAUSED = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"


def write_plugin(folder: Path) -> None:
    """Make the plugin known to a server with ``folder`` on its import path."""
    installed = folder / f"{PLUGIN}_server_hooks-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}-server-hooks\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{PLUGIN} = {__name__}:register\n")


def register() -> None:
    """SGLang's entry, in each process of the server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(PAUSED, rest_while_paused, HookType.AFTER)


def rest_while_paused(_result: None, scheduler: Any) -> None:
    """Sleep until a call comes; ranks without a socket of their own wait for the first rank's anyway."""
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.maybe_sleep()
