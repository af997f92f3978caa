"""Tables of faults: faults that end a run, and faults that a run survives.

``pytest -m "slow or not slow" tests/e2e/test_faults.py`` tests every row of both tables. Each row of the second table
is tested on both engines, and a row of the first table on its ``engines``. A seed decides the moment of a fault within
its phase. The test prints the seed, and ``ASYNCRL_FAULT_SEED=N`` sets the seed.
"""

import signal
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.e2e.run_checks import (
    assert_every_step_is_made_and_no_version_goes_back,
    assert_every_token_is_accounted_for,
    assert_trained_tokens_have_the_log_prob_of_their_version,
)
from tests.support.leftovers import left_in_shared_memory, shared_memory_of
from tests.support.training_run import ROOT, RunningTraining

SUPERVISOR, CONTROLLER = "supervisor", "controller"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that is injected into a run, and the expected end of the run.

    Attributes:
        part: The process that gets the signal: ``supervisor``, ``controller``, or words of a process's name or command.
        signal: The signal.
        moment: Words of the line that the run prints at the start of the phase in which the fault is injected.
        status: The expected exit status.
        words: Words that the last 40 lines must contain.
        options: Further options of the run.
        engines: Names of the engines with which the test runs.
        end_timeout_s: Time within which the run must have ended.
        goes_on: Whether the run survives the fault. If true, the run makes further steps, then SIGTERM stops the run.
        within_s: Largest number of seconds from the line ``moment`` to the signal.
    """

    part: str
    signal: signal.Signals
    moment: str
    status: int
    words: tuple[str, ...]
    options: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("transformers", "sglang")
    end_timeout_s: float = 20.0
    goes_on: bool = False
    within_s: float = 0.5

    def __str__(self) -> str:
        options = "-".join(option.partition("=")[0] for option in self.options)
        return f"{self.part}-{self.signal.name}-{self.moment.strip().replace(' ', '_')}" + f"-{options}" * bool(options)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A fault that the run survives.

    Attributes:
        part: Words of the command line of the process that gets the signal.
        signal: The signal.
        words: Words of the line that reports the restart. If empty, the test waits for three further steps.
        moment: Words of the line after which the test sends the signal. If empty, the test waits for ``after_steps``
            steps instead.
        after_steps: Number of steps before the signal, if ``moment`` is empty.
        options: Further options of the run.
        restarts: Number of restarts that the summary must report, by part.
    """

    part: str
    signal: signal.Signals
    options: tuple[str, ...]
    words: str = ""
    moment: str = ""
    after_steps: int = 5
    restarts: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        options = "-".join(option.partition("=")[0].rpartition(".")[2] for option in self.options)
        when = f"-{self.moment.replace(' ', '_')}" if self.moment else "-last" * (self.after_steps == LAST)
        return f"{self.part.replace(' ', '_')}-{self.signal.name}{when}-{options}"


STEPS = 30
"""Number of steps of a run that survives its fault."""
LAST = STEPS - 1
"""Number of steps that are finished when the last step runs."""
STARTED, TRAINING = "writing to", "step 1/"
LEARNER_STARTS, FLEET_STARTS, STOPS = "waiting for learner", "waiting for rollout fleet", "stopping"
EVALUATES = "engines): ready"  # an evaluation begins when the fleet is ready
_OWN_REWARD = f"rollout_fleet.reward={ROOT / 'scripts/examples/sorting/sorting_reward.py'}:leading_numbers"
_TRANSFORMERS, _SGLANG = {"engines": ("transformers",)}, {"engines": ("sglang",)}
_NO_RESTARTS = ("rollout_fleet.restarts=0",)
_SHORT_SILENCE = ("rollout_fleet.silence_timeout_s=4",)
_SHORT_WAITS = ("buffer.request_timeout_s=6", "rollout_fleet.load_timeout_s=6")


def _stopped(number: signal.Signals, moment: str) -> Fault:
    """Return an entry of `FAULTS` for a run that is stopped by a signal.

    The run reports the signal, and exits with 128 plus the signal's number.
    """
    return _killed(SUPERVISOR, f"stopped by {number.name}", signal=number, moment=moment, status=128 + number)


def _replaced(part: str, **changes: Any) -> Fault:
    """Return an entry of `FAULTS` for a killed member of the fleet.

    The member is replaced, and the run continues until it is stopped.
    """
    return _killed(part, "stopped by SIGTERM", status=128 + signal.SIGTERM, goes_on=True, **changes)


def _killed(part: str, *words: str, **changes: Any) -> Fault:
    """Return an entry of `FAULTS` for a part that is killed during training. The run must end with an error."""
    return Fault(**{"part": part, "signal": signal.SIGKILL, "moment": TRAINING, "status": 1, "words": words} | changes)


FAULTS = (
    _stopped(signal.SIGTERM, STARTED),
    _stopped(signal.SIGINT, STARTED),
    _stopped(signal.SIGTERM, "waiting for Ray"),
    _stopped(signal.SIGTERM, "waiting for learner"),
    _stopped(signal.SIGINT, "waiting for learner"),
    _stopped(signal.SIGTERM, TRAINING),
    _stopped(signal.SIGINT, TRAINING),
    _killed(SUPERVISOR, status=-signal.SIGKILL),
    _killed(CONTROLLER, "error: the controller died of SIGKILL"),
    _killed(CONTROLLER, "error: the controller died of SIGKILL", options=(_OWN_REWARD,), **_TRANSFORMERS),
    _killed("gcs/gcs_server", "error: Ray's control service"),
    _killed("raylet/raylet", "error: Ray's node manager (raylet"),
    _killed("buffer.server", "error: the buffer server (pid"),
    _killed("ray::ActorWorker", "error: ", "learner"),
    _killed("ray::RolloutWorker", "error: ", "rollout", options=_NO_RESTARTS),
    _killed("buffer.server", "error: the buffer server (pid", moment=LEARNER_STARTS, **_TRANSFORMERS),
    _killed("ray::ActorWorker", "error: ", "learner", moment=LEARNER_STARTS, **_TRANSFORMERS),
    _killed("ray::RolloutWorker", "error: ", "rollout", moment=FLEET_STARTS, **_TRANSFORMERS),
    _killed("buffer.server", status=0, moment=STOPS, options=("total_steps=3",), within_s=0.0, **_TRANSFORMERS),
    _killed("sglang.launch_server", "sglang-0 died", "sglang-0.log", options=_NO_RESTARTS, **_SGLANG),
    _replaced("ray::RolloutWorker"),
    _replaced("sglang.launch_server", **_SGLANG),
    _replaced("sglang::scheduler", **_SGLANG),
    _replaced("sglang::scheduler", signal=signal.SIGSTOP, options=_SHORT_SILENCE, **_SGLANG),
    _replaced("ray::RolloutWorker", signal=signal.SIGSTOP, options=_SHORT_WAITS),
    _killed(
        "asyncrl sft",
        "error: the warm start",
        moment="warm start: step",
        options=("sft.enabled=true", "sft.target_accuracy=1.01"),
        **_TRANSFORMERS,
    ),
)


_ON_DISK = ("buffer.durability=disk", "buffer.directory={folder}/journal")
_STORES = ("buffer.num_store_servers=2",)
_HOST_STORES = ("buffer.stores_on=hosts",)
_CHECKPOINTS = ("checkpoint.every_steps=2",)
_LOST_STORE = (*_CHECKPOINTS, "learner.restarts=2")
_SHORT_REQUESTS = ("buffer.request_timeout_s=12",)
_NETWORK = ("learner.num_ranks=2", "weights.transport=collective")
_EVALUATED = ("evaluation.enabled=true",)
_EACH_STEP = ("checkpoint.every_steps=1", "learner.restarts=2")
_BUFFER, _BUFFER_ALONE, _STORE = "buffer.server --groups", "buffer.server --groups-per-step 8", "--store 0"
_LEARNER, _WORKER = "ray::ActorWorker", "ray::RolloutWorker"
_SAID = {
    "": "",
    "buffer": "it was started again at",
    "stores": "it was started again at",
    "learner": "the learner continues from version",
}


def _recovers(part: str, *options: str, restarts: str = "", **changes: Any) -> Recovery:
    """Return an entry of `RECOVERIES` for a killed part. The summary counts the part's restarts under ``restarts``."""
    row = {"part": part, "signal": signal.SIGKILL, "options": options, "words": _SAID[restarts]}
    return Recovery(**row | {"restarts": {restarts: 1} if restarts else {}} | changes)


_HANGS = {"signal": signal.SIGSTOP}
_KILLED_SILENT = "answered nothing for 6.0 s (half of buffer.request_timeout_s) and was killed; it was started again at"
RECOVERIES = (
    _recovers(_BUFFER, *_ON_DISK, restarts="buffer"),
    _recovers(_BUFFER, *_ON_DISK, *_SHORT_REQUESTS, restarts="buffer", words=_KILLED_SILENT, **_HANGS),
    _recovers(_STORE, *_ON_DISK, *_STORES),
    _recovers(_STORE, *_ON_DISK, *_STORES, *_SHORT_REQUESTS, **_HANGS),
    _recovers(_STORE, *_STORES, *_LOST_STORE),
    _recovers(_BUFFER_ALONE, *_ON_DISK, *_HOST_STORES, restarts="buffer"),
    _recovers(_STORE, *_ON_DISK, *_HOST_STORES, restarts="stores"),
    _recovers(_STORE, *_ON_DISK, *_HOST_STORES, *_SHORT_REQUESTS, restarts="stores", **_HANGS),
    _recovers(_STORE, *_HOST_STORES, *_LOST_STORE, restarts="stores"),
    _recovers(_LEARNER, *_CHECKPOINTS, restarts="learner"),
    _recovers(_LEARNER, *_CHECKPOINTS, "learner.num_ranks=2", "weights.full_every=3", restarts="learner"),
    _recovers(_LEARNER, *_CHECKPOINTS, "learner.step_timeout_s=10", restarts="learner", **_HANGS),
    _recovers(_LEARNER, *_CHECKPOINTS, *_NETWORK, restarts="learner"),
    _recovers(_LEARNER, *_CHECKPOINTS, *_NETWORK, "weights.collective_into=engine", restarts="learner"),
)
SELDOM = (
    _recovers(_BUFFER, *_ON_DISK, restarts="buffer", moment=LEARNER_STARTS),
    _recovers(_WORKER, *_EVALUATED, moment=EVALUATES, words="rollout worker 0 is back"),
    _recovers(_WORKER, *_EVALUATED, after_steps=LAST),
    _recovers(_BUFFER, *_ON_DISK, *_EVALUATED, restarts="buffer", moment=EVALUATES),
    _recovers(_LEARNER, *_EACH_STEP, restarts="learner"),
    _recovers(_BUFFER, *_ON_DISK, *_EACH_STEP, restarts="buffer"),
    _recovers(_LEARNER, *_EACH_STEP, after_steps=LAST),
    _recovers(_BUFFER, *_ON_DISK, after_steps=LAST),
)
"""Faults at moments that other tests rarely select: the start, an evaluation, a checkpoint, the last step."""


def parts_of(engine: str, groups_per_step: int) -> dict[str, str]:
    """Map each part of a run to words that only the command lines of the part's processes contain."""
    parts = {
        "worker": "ray::RolloutWorker",
        "store": "--store ",
        "buffer": f"buffer.server --groups-per-step {groups_per_step}",
        "learner": "ray::ActorWorker",
    }
    return parts | ({"engine": "sglang::scheduler"} if engine == "sglang" else {})


def assert_it_ends_right(
    run: RunningTraining, *, num_steps: int, timeout_s: float, groups_per_step: int = 8, every: int = 23
) -> None:
    """Wait for the end of a run with faults, and check its results.

    Recompute the log-probs of every ``every``-th sample with the run's snapshots. If ``every`` is 0, recompute none.
    """
    run.remember_family()
    shared_memory = shared_memory_of(run.family.values())
    assert run.finish(timeout_s) == 0, run.output
    assert_every_step_is_made_and_no_version_goes_back(run, num_steps)
    assert sum(run.summary["max_lag"]["histogram"].values()) == groups_per_step * num_steps
    assert_every_token_is_accounted_for(run)
    if every:
        assert_trained_tokens_have_the_log_prob_of_their_version(run, every=every)
    assert_nothing_is_left(run, shared_memory)


def assert_nothing_is_left(run: RunningTraining, shared_memory: set[int]) -> None:
    """Check that no processes, ports, scratch folders or shared memory of the run remain.

    ``shared_memory`` has the inodes of the files in shared memory that the run mapped.
    """
    assert run.survivors() == []
    assert left_in_shared_memory(shared_memory) == []
    assert not run.left_in_shared_memory()
    assert [path.name for path in run.scratch.glob("asyncrl-*")] == []
    listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in run.family]
    assert listening == []
