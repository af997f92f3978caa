"""The endings of a run as a table: who gets which signal at which moment, and how the run is expected to end.

``pytest -m slow tests/e2e/test_faults.py`` runs every row on both engines. The moment within a phase is drawn from a
seed, which is printed: ``ASYNCRL_FAULT_SEED=N`` repeats it.
"""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SUPERVISOR, CONTROLLER = "supervisor", "controller"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row.

    Attributes:
        part: Who gets the signal: ``supervisor``, ``controller``, or words of a process's name or command line.
        signal: The signal.
        moment: The run is in this phase: a part of a line that it prints when it begins.
        status: The exit status that is expected.
        words: All of them stand in the last 40 lines.
        options: Further options of the run.
        engines: Engines that the row is about.
        end_timeout_s: How soon the run must have ended.
    """

    part: str
    signal: signal.Signals
    moment: str
    status: int
    words: tuple[str, ...]
    options: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("transformers", "sglang")
    end_timeout_s: float = 20.0

    def __str__(self) -> str:
        """For the test's name."""
        return f"{self.part}-{self.signal.name}-{self.moment.strip().replace(' ', '_')}"


STARTED, TRAINING = "writing to", "step 1/"
_SHORT_WAITS = ("buffer.request_timeout_s=6", "rollout_fleet.load_timeout_s=6")

FAULTS = (
    Fault(part=SUPERVISOR, signal=signal.SIGTERM, moment=STARTED, status=143, words=("stopped by SIGTERM",)),
    Fault(part=SUPERVISOR, signal=signal.SIGINT, moment=STARTED, status=130, words=("stopped by SIGINT",)),
    Fault(part=SUPERVISOR, signal=signal.SIGTERM, moment="waiting for Ray", status=143, words=("stopped by SIGTERM",)),
    Fault(
        part=SUPERVISOR, signal=signal.SIGTERM, moment="waiting for learner", status=143, words=("stopped by SIGTERM",)
    ),
    Fault(part=SUPERVISOR, signal=signal.SIGTERM, moment=TRAINING, status=143, words=("stopped by SIGTERM",)),
    Fault(part=SUPERVISOR, signal=signal.SIGINT, moment=TRAINING, status=130, words=("stopped by SIGINT",)),
    Fault(
        part=CONTROLLER,
        signal=signal.SIGKILL,
        moment=TRAINING,
        status=1,
        words=("error: the controller died of SIGKILL",),
    ),
    Fault(
        part="gcs/gcs_server",
        signal=signal.SIGKILL,
        moment=TRAINING,
        status=1,
        words=("gcs_server",),
    ),
    Fault(
        part="raylet/raylet",
        signal=signal.SIGKILL,
        moment=TRAINING,
        status=1,
        words=("error: Ray's node manager (raylet",),
    ),
    Fault(
        part="buffer.server", signal=signal.SIGKILL, moment=TRAINING, status=1, words=("error: the buffer server (pid",)
    ),
    Fault(part="ray::ActorWorker", signal=signal.SIGKILL, moment=TRAINING, status=1, words=("error: ", "learner")),
    Fault(part="ray::RolloutWorker", signal=signal.SIGKILL, moment=TRAINING, status=1, words=("error: ", "rollout")),
    Fault(
        part="ray::RolloutWorker",
        signal=signal.SIGSTOP,
        moment=TRAINING,
        status=1,
        words=("error: waited", "group 'rollout' rank 0"),
        options=_SHORT_WAITS,
        end_timeout_s=60.0,
    ),
    Fault(
        part="sglang.launch_server",
        signal=signal.SIGKILL,
        moment=TRAINING,
        status=1,
        words=("error: sglang-0", "sglang-0.log"),
        engines=("sglang",),
    ),
)


@dataclass(frozen=True)
class Belongings:
    """What a run could leave on this machine.

    Attributes:
        shared_memory: Names in ``/dev/shm``.
        scratch: Folders of servers in the temporary directory.
        listening: Ports that something listens on.
    """

    shared_memory: frozenset[str] = field(default_factory=frozenset)
    scratch: frozenset[str] = field(default_factory=frozenset)
    listening: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def now(cls, family: set[int]) -> "Belongings":
        """What there is now; ports count where a process of the run listens on them."""
        ports = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in family}
        temporary = Path(os.environ.get("TMPDIR", "/tmp"))
        return cls(
            shared_memory=frozenset(
                path.name
                for path in Path("/dev/shm").iterdir()
                if path.name.startswith(("asyncrl-", "sglang_", "sem.mp-"))
            ),
            scratch=frozenset(path.name for path in temporary.glob("asyncrl-*")),
            listening=frozenset(ports),
        )
