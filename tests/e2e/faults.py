"""The endings of a run as a table: who gets which signal at which moment, and how the run is expected to end.

Beside it a table of faults that a run outlives.

``pytest -m "slow or not slow" tests/e2e/test_faults.py`` runs every row on both engines. The moment within a phase is
drawn from a seed, which is printed: ``ASYNCRL_FAULT_SEED=N`` repeats it.
"""

import signal
from dataclasses import dataclass
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
    """One row.

    Attributes:
        part: Who gets the signal: ``supervisor``, ``controller``, or words of a process's name or command.
        signal: The signal.
        moment: The run is in this phase: a part of a line that it prints when it begins.
        status: The exit status that is expected.
        words: All of them stand in the last 40 lines.
        options: Further options of the run.
        engines: Engines that the row is about.
        end_timeout_s: How soon the run must have ended.
        goes_on: The run outlives the fault, makes further steps, and is then stopped by SIGTERM.
        within_s: The signal comes so long after the moment at most.
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
        """For the test's name."""
        options = "-".join(option.partition("=")[0] for option in self.options)
        return f"{self.part}-{self.signal.name}-{self.moment.strip().replace(' ', '_')}" + f"-{options}" * bool(options)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A fault that the run outlives.

    Attributes:
        part: Words of the command line of the process that gets the signal.
        signal: The signal.
        words: Stand in the line that says that the part is up again; where nothing says so, three steps count.
        moment: When the signal comes: the run prints a line with these words. Empty: ``after_steps`` says it.
        after_steps: When the signal comes otherwise.
        options: Further options of the run.
        restarts: What the summary counts as started again, by part.
    """

    part: str
    signal: signal.Signals
    options: tuple[str, ...]
    words: str = ""
    moment: str = ""
    after_steps: int = 5
    restarts: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        """For the test's name."""
        options = "-".join(option.partition("=")[0].rpartition(".")[2] for option in self.options)
        when = f"-{self.moment.replace(' ', '_')}" if self.moment else "-last" * (self.after_steps == LAST)
        return f"{self.part.replace(' ', '_')}-{self.signal.name}{when}-{options}"


STEPS = 30
"""Of a run that outlives a fault."""
LAST = STEPS - 1
"""Steps that are made when the last one is under way."""
STARTED, TRAINING = "writing to", "step 1/"
LEARNER_STARTS, FLEET_STARTS, STOPS = "waiting for learner", "waiting for rollout fleet", "stopping"
EVALUATES = "engines): ready"  # the fleet comes up after the learner
_OWN_REWARD = f"{ROOT / 'scripts/examples/sorting/sorting_reward.py'}:leading_numbers"
_NO_RESTARTS = ("rollout_fleet.restarts=0",)
_SHORT_SILENCE = ("rollout_fleet.silence_timeout_s=4",)
_SHORT_WAITS = ("buffer.request_timeout_s=6", "rollout_fleet.load_timeout_s=6")


def _stopped(number: signal.Signals, moment: str) -> Fault:
    """A run that is asked to stop says so, and its status is the one that shells give to this signal."""
    return Fault(
        part=SUPERVISOR, signal=number, moment=moment, status=128 + number, words=(f"stopped by {number.name}",)
    )


def _replaced(part: str, **changes: Any) -> Fault:
    """A member of the fleet that is killed while training is replaced: the run goes on until it is stopped."""
    return _killed(
        part, **{"status": 128 + signal.SIGTERM, "words": ("stopped by SIGTERM",), "goes_on": True} | changes
    )


def _killed(part: str, *words: str, **changes: Any) -> Fault:
    """A part that is killed while training ends the run with an error that names it."""
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
    _killed(
        CONTROLLER,
        "error: the controller died of SIGKILL",
        options=(f"rollout_fleet.reward={_OWN_REWARD}",),
        engines=("transformers",),
    ),
    _killed("gcs/gcs_server", "error: Ray's control service"),
    _killed("raylet/raylet", "error: Ray's node manager (raylet"),
    _killed("buffer.server", "error: the buffer server (pid"),
    _killed("ray::ActorWorker", "error: ", "learner"),
    _killed("ray::RolloutWorker", "error: ", "rollout", options=_NO_RESTARTS),
    _killed("buffer.server", "error: the buffer server (pid", moment=LEARNER_STARTS, engines=("transformers",)),
    _killed("ray::ActorWorker", "error: ", "learner", moment=LEARNER_STARTS, engines=("transformers",)),
    _killed("ray::RolloutWorker", "error: ", "rollout", moment=FLEET_STARTS, engines=("transformers",)),
    _killed(
        "buffer.server", status=0, moment=STOPS, options=("total_steps=3",), engines=("transformers",), within_s=0.0
    ),
    _killed("sglang.launch_server", "sglang-0 died", "sglang-0.log", engines=("sglang",), options=_NO_RESTARTS),
    _replaced("ray::RolloutWorker"),
    _replaced("sglang.launch_server", engines=("sglang",)),
    _replaced("sglang::scheduler", engines=("sglang",)),
    _replaced("sglang::scheduler", engines=("sglang",), signal=signal.SIGSTOP, options=_SHORT_SILENCE),
    _replaced("ray::RolloutWorker", signal=signal.SIGSTOP, options=_SHORT_WAITS),
    _killed(
        "asyncrl sft",
        "error: the warm start",
        moment="warm start: step",
        options=("sft.enabled=true", "sft.target_accuracy=1.01"),
        engines=("transformers",),
    ),
)


_ON_DISK = ("buffer.durability=disk", "buffer.directory={folder}/journal")
_STORES = ("buffer.num_store_servers=2",)
_HOST_STORES = ("buffer.stores_on=hosts",)
_CHECKPOINTS = ("checkpoint.every_steps=2",)
_NETWORK = ("weights.transport=collective",)
_BUFFER, _LEARNER, _HOST_STORE = ("buffer", 1), ("learner", 1), ("stores", 1)

RECOVERIES = (
    Recovery(
        part="buffer.server --groups",
        signal=signal.SIGKILL,
        words="it was started again at",
        options=_ON_DISK,
        restarts=(_BUFFER,),
    ),
    Recovery(
        part="buffer.server --groups",
        signal=signal.SIGSTOP,
        words="answered nothing for 6.0 s (half of buffer.request_timeout_s) and was killed; it was started again at",
        options=(*_ON_DISK, "buffer.request_timeout_s=12"),
        restarts=(_BUFFER,),
    ),
    Recovery(part="--store 0", signal=signal.SIGKILL, options=(*_ON_DISK, *_STORES)),
    Recovery(part="--store 0", signal=signal.SIGSTOP, options=(*_ON_DISK, *_STORES, "buffer.request_timeout_s=12")),
    Recovery(
        part="--store 0",
        signal=signal.SIGKILL,
        options=(*_STORES, *_CHECKPOINTS, "learner.restarts=2"),
    ),
    Recovery(
        part="buffer.server --groups-per-step 8",
        signal=signal.SIGKILL,
        words="it was started again at",
        options=(*_ON_DISK, *_HOST_STORES),
        restarts=(_BUFFER,),
    ),
    Recovery(
        part="--store 0",
        signal=signal.SIGKILL,
        words="it was started again at",
        options=(*_ON_DISK, *_HOST_STORES),
        restarts=(_HOST_STORE,),
    ),
    Recovery(
        part="--store 0",
        signal=signal.SIGSTOP,
        words="it was started again at",
        options=(*_ON_DISK, *_HOST_STORES, "buffer.request_timeout_s=12"),
        restarts=(_HOST_STORE,),
    ),
    Recovery(
        part="--store 0",
        signal=signal.SIGKILL,
        words="it was started again at",
        options=(*_HOST_STORES, *_CHECKPOINTS, "learner.restarts=2"),
        restarts=(_HOST_STORE,),
    ),
    Recovery(
        part="ray::ActorWorker",
        signal=signal.SIGKILL,
        words="the learner goes on from version",
        options=_CHECKPOINTS,
        restarts=(_LEARNER,),
    ),
    Recovery(
        part="ray::ActorWorker",
        signal=signal.SIGKILL,
        words="the learner goes on from version",
        options=(*_CHECKPOINTS, "learner.num_ranks=2", "weights.full_every=3"),
        restarts=(_LEARNER,),
    ),
    Recovery(
        part="ray::ActorWorker",
        signal=signal.SIGSTOP,
        words="the learner goes on from version",
        options=(*_CHECKPOINTS, "learner.step_timeout_s=10"),
        restarts=(_LEARNER,),
    ),
    *(
        Recovery(
            part="ray::ActorWorker",
            signal=signal.SIGKILL,
            words="the learner goes on from version",
            options=(*_CHECKPOINTS, "learner.num_ranks=2", *transport),
            restarts=(_LEARNER,),
        )
        for transport in (_NETWORK, (*_NETWORK, "weights.collective_into=engine"))
    ),
)

_EVALUATED = ("evaluation.enabled=true",)
_EACH_STEP = ("checkpoint.every_steps=1", "learner.restarts=2")

SELDOM = (
    Recovery(
        part="buffer.server --groups",
        signal=signal.SIGKILL,
        moment=LEARNER_STARTS,
        words="it was started again at",
        options=_ON_DISK,
        restarts=(_BUFFER,),
    ),
    *(
        Recovery(part="ray::RolloutWorker", signal=signal.SIGKILL, options=options, **when)
        for when, options in (
            ({"moment": EVALUATES, "words": "rollout worker 0 is back"}, _EVALUATED),
            ({"after_steps": LAST}, _EVALUATED),
        )
    ),
    Recovery(
        part="buffer.server --groups",
        signal=signal.SIGKILL,
        moment=EVALUATES,
        words="it was started again at",
        options=(*_ON_DISK, *_EVALUATED),
        restarts=(_BUFFER,),
    ),
    Recovery(
        part="ray::ActorWorker",
        signal=signal.SIGKILL,
        words="the learner goes on from version",
        options=_EACH_STEP,
        restarts=(_LEARNER,),
    ),
    Recovery(
        part="buffer.server --groups",
        signal=signal.SIGKILL,
        words="it was started again at",
        options=(*_ON_DISK, *_EACH_STEP),
        restarts=(_BUFFER,),
    ),
    Recovery(part="ray::ActorWorker", signal=signal.SIGKILL, after_steps=LAST, options=_EACH_STEP),
    Recovery(part="buffer.server --groups", signal=signal.SIGKILL, after_steps=LAST, options=_ON_DISK),
)
"""Moments that are seldom hit: the start, an evaluation, a checkpoint, the last step."""


def parts_of(engine: str, groups_per_step: int) -> dict[str, str]:
    """Words of the command lines of a run's processes, by part; stores stand on hosts."""
    parts = {
        "worker": "ray::RolloutWorker",
        "store": "--store ",
        "buffer": f"buffer.server --groups-per-step {groups_per_step}",
        "learner": "ray::ActorWorker",
    }
    return parts | ({"engine": "sglang::scheduler"} if engine == "sglang" else {})


def assert_it_ends_right(run: RunningTraining, *, num_steps: int, groups_per_step: int, timeout_s: float) -> None:
    """Wait for the end of a run in which many things happened, and check all that must be right although they did."""
    run.remember_family()
    shared_memory = shared_memory_of(run.family.values())
    assert run.finish(timeout_s) == 0, run.output
    assert_every_step_is_made_and_no_version_goes_back(run, num_steps)
    assert sum(run.summary["max_lag"]["histogram"].values()) == groups_per_step * num_steps
    assert_every_token_is_accounted_for(run)
    assert_trained_tokens_have_the_log_prob_of_their_version(run, every=23)
    assert_nothing_is_left(run, shared_memory)


def assert_nothing_is_left(run: RunningTraining, shared_memory: set[int]) -> None:
    """Neither processes, nor ports, nor scratch folders, nor shared memory; ``shared_memory`` is what it mapped."""
    assert run.survivors() == []
    assert left_in_shared_memory(shared_memory) == []
    assert not run.left_in_shared_memory()
    assert [path.name for path in run.scratch.glob("asyncrl-*")] == []
    listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in run.family]
    assert listening == []
