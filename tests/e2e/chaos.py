"""Starts and resumes one training run repeatedly, and injects random faults.

All random numbers come from one seed, so the same seed repeats the faults and the pauses. The test sends signals only
to processes whose environment variable TMPDIR names the run's scratch folder.
"""

import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from asyncrl.core.errors import AsyncRLError
from asyncrl.run.run_socket import ask_for_checkpoint
from learner.checkpoint_folder import newest_checkpoint
from tests.support.training_run import ROOT, RunningTraining, words_of

DEADLINE_S = 12.0
"""``buffer.request_timeout_s`` and ``learner.step_timeout_s`` of the run."""
START_TIMEOUT_S = 120.0
SAVE_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 15.0
SILENCE_S = START_TIMEOUT_S + SAVE_TIMEOUT_S + STOP_TIMEOUT_S
"""The test fails if a run prints nothing and makes no step for this long. All deadlines of the run are shorter."""
NO_STEP_S = 900.0
"""The test fails if the run makes no step for this long, over several starts."""
GROUPS_PER_STEP = 8
TOTAL_STEPS = "1000000"
"""The number of steps for all starts except the last one. No start makes so many steps."""
FILLER = "filler"
"""The name of the file that fills the disk."""
PARTS = {
    "worker": "ray::RolloutWorker",
    "engine": "sglang::scheduler",
    "reward": "rollout_fleet.rewards",
    "store": "--store ",
    "buffer": "buffer.server --groups",
    "learner": "ray::ActorWorker",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
    "controller": "asyncrl train",
    "supervisor": "asyncrl train",
}
"""Words of the command lines of a run's processes. The supervisor is the parent of the controller."""
OPTIONS = [
    "sft.enabled=false",
    "evaluation.enabled=false",
    f"algorithm.groups_per_step={GROUPS_PER_STEP}",
    f"rollout_fleet.reward={ROOT / 'tests/support/varied_reward.py'}:share_of_even_digits",
    "rollout_fleet.restarts=20",
    "rollout_fleet.restart_backoff_s=0.2",
    "rollout_fleet.silence_timeout_s=6",
    "rollout_fleet.load_timeout_s=15",
    f"rollout_fleet.start_timeout_s={START_TIMEOUT_S:g}",
    "buffer.durability=disk",
    "buffer.num_store_servers=2",
    "buffer.restarts=20",
    f"buffer.request_timeout_s={DEADLINE_S:g}",
    "learner.restarts=20",
    f"learner.step_timeout_s={DEADLINE_S:g}",
    f"learner.start_timeout_s={START_TIMEOUT_S:g}",
    "checkpoint.every_steps=2",
    f"save_timeout_s={SAVE_TIMEOUT_S:g}",
    f"stop_timeout_s={STOP_TIMEOUT_S:g}",
    f"total_steps={TOTAL_STEPS}",
]
ENGINES = {"transformers": ["rollout_fleet.num_engines=2"], "sglang": ["rollout_fleet.num_engines=1"]}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One fault or request.

    Attributes:
        kind: ``kill``, ``stall``, ``pair`` (two simultaneous kills), ``stop`` (SIGTERM), ``checkpoint``, ``full``
            (disk), or ``kill all``.
        parts: Parts of the run. One process of each part is killed or stalled. For ``stop``, the process is killed
            while the run stops.
        share: A number in [0, 1) that selects the process of a part. If the part has n processes, the index of the
            process is ``int(share * n)``.
        in_training: Whether the pause begins with the first step after the start. If false, it begins immediately.
        pause_s: Pause before the event.
        length_s: Seconds that a stall or a full disk lasts, or seconds from SIGTERM to the kill.
        stays: Whether the disk stays full for the next start, if the run ends while the disk is full.
    """

    kind: str
    parts: tuple[str, ...]
    share: float
    in_training: bool
    pause_s: float
    length_s: float
    stays: bool

    def __str__(self) -> str:
        parts = f" of {' and '.join(self.parts)}" if self.parts else ""
        return f"{self.kind}{parts}" + f" for {self.length_s:.1f} s" * (self.kind in ("stall", "full"))


_KINDS = {"kill": 34, "stall": 20, "pair": 8, "stop": 12, "checkpoint": 10, "full": 9, "kill all": 7}
_MOST_PARTS = {"kill": 1, "stall": 1, "pair": 2}
_STOPS_DISTURBED = 0.3
_SHARE_IN_TRAINING = 0.75


def drawn_events(seed: int) -> Iterator[Event]:
    """Yield an endless sequence of random events."""
    draw = random.Random(seed)
    while True:
        (kind,) = draw.choices(list(_KINDS), list(_KINDS.values()))
        parts = draw.sample(sorted(PARTS), 2)
        number = _MOST_PARTS.get(kind, 0)
        if (disturbed := draw.random() < _STOPS_DISTURBED) and kind == "stop":
            number = 1
        below, above = draw.uniform(0.5, 0.8 * DEADLINE_S), draw.uniform(DEADLINE_S, 1.6 * DEADLINE_S)
        lengths = {"stall": draw.choice([below, above]), "full": below, "stop": below / 4}
        yield Event(
            kind=kind,
            parts=tuple(parts[:number]),
            share=draw.random(),
            in_training=draw.random() < _SHARE_IN_TRAINING,
            pause_s=draw.uniform(0.5, 14.0),
            length_s=lengths.get(kind, 0.0),
            stays=disturbed,
        )


@contextmanager
def small_disk(folder: Path, size_mb: int) -> Iterator[Path]:
    """Mount a file system of limited size on ``folder``.

    Only root can mount a file system. If the body of the ``with`` fails, the files are copied to a sibling folder.
    """
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "chaos", folder], check=True)
    try:
        yield folder
    except BaseException:
        kept = folder.with_name(f"{folder.name}_at_failure")
        shutil.copytree(folder, kept, symlinks=True, ignore=shutil.ignore_patterns(FILLER))
        raise
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@dataclass(kw_only=True)
class Lineage:
    """One training run with all its lives. A life lasts from a start of the run until it ends or is killed.

    Attributes:
        disk: A file system of limited size. The run writes to ``disk/out`` and ``disk/journal``.
        seed: Seed of all random numbers.
        start: Function that starts the run with the given options.
        say: Function that receives a line about each event.
        counts: Number of events of each kind and part, and number of lives with each kind of end.
        lives: Folders of the lives, oldest first. A life that ended early possibly has no folder.
    """

    disk: Path
    seed: int
    start: Callable[..., RunningTraining]
    say: Callable[[str], None]
    counts: Counter[str] = field(default_factory=Counter)
    lives: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events = drawn_events(self.seed)
        self._engines = random.Random(self.seed + 1)
        self._options = [*OPTIONS, f"buffer.directory={self.disk / 'journal'}"]
        if self.seed % 2:  # with an odd seed, all starts of the run use the same folder of checkpoints
            self._options.append(f"checkpoint.directory={self.disk / 'checkpoints'}")
        self._command = [*self._options, "checkpoint.resume=never"]
        self._newest_step, self._step_s = -1, time.monotonic()
        self.run: RunningTraining

    def through(self, duration_s: float, sglang_share: float) -> RunningTraining:
        """Inject random events for ``duration_s`` seconds after the first checkpoint.

        Resume the run each time it ends. Finally let the run end normally.
        """
        self._begin("transformers")
        self._await(lambda: bool(self.checkpoint()), "the first checkpoint", 240.0)
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            event = next(self._events)
            if event.in_training:
                self._watch(NO_STEP_S, until=self._trains)
            self._watch(event.pause_s)
            if self.run.process.poll() is None:
                self._inject(event)
            if self.run.process.poll() is not None:
                self._end()
                self._begin("sglang" if self._engines.random() < sglang_share else "transformers")
        return self._last_life()

    def _last_life(self) -> RunningTraining:
        """Stop the run, resume it for the last time, and let it make 20 steps."""
        if self.run.process.poll() is None:
            self.run.process.send_signal(signal.SIGTERM)
            self._note("stop, after the last event")
        self._watch(SILENCE_S)
        self._end()
        checkpoint = self.checkpoint()
        assert checkpoint is not None
        self._begin("transformers", f"total_steps={int(checkpoint.name[1:]) + 20}")
        self._watch(NO_STEP_S)
        self._end(is_last=True)
        assert self.run.process.returncode == 0, self._tail()
        return self.run

    def _begin(self, engine: str, *options: str) -> None:
        """Start the run with the options in ``_command``. After each end of the run, `_end` sets the next options."""
        resume = next(one for one in self._command if one.startswith("checkpoint.resume="))
        self.run = self.start(
            *self._command, f"rollout_fleet.engine={engine}", *ENGINES[engine], *options, output_dir=self.disk / "out"
        )
        self._heard_s = time.monotonic()
        self._killed_by_us: set[str] = set()
        self._has_folder = False
        self._note(f"life {self.counts['lives']} begins with {engine}: {resume}")
        self.counts["lives"] += 1

    def _inject(self, event: Event) -> None:
        self._note(str(event))
        self.counts[event.kind] += 1
        match event.kind:
            case "kill" | "pair":
                for part in event.parts:
                    self._signal(part, signal.SIGKILL, event.share)
            case "stall":
                if (process := self._signal(event.parts[0], signal.SIGSTOP, event.share)) is not None:
                    self._watch(event.length_s)
                    with suppress(psutil.NoSuchProcess):  # the run has replaced the process
                        process.send_signal(signal.SIGCONT)
            case "stop":
                self._stop(event)
            case "checkpoint":
                self._ask_for_checkpoint()
            case "full":
                self._fill(event)
            case "kill all":
                self._kill_all()

    def _stop(self, event: Event) -> None:
        """Send SIGTERM to the run, and wait for its end. If the event names parts, kill them while the run stops."""
        self.run.process.send_signal(signal.SIGTERM)
        self._watch(event.length_s)
        for part in event.parts:
            self._note(f"… and SIGKILL of the {part}")
            self._signal(part, signal.SIGKILL, event.share)
        self._watch(SILENCE_S)
        assert self.run.process.poll() is not None, f"the run must end within {SILENCE_S:g} s after SIGTERM"

    def _kill_all(self) -> None:
        self._killed_by_us.add("supervisor")
        while processes := self._processes():
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)

    def _signal(self, part: str, number: signal.Signals, share: float) -> psutil.Process | None:
        """Send a signal to one process of ``part`` and return the process. Returns None if the part has no process."""
        words = {process: words_of(process) for process in self._processes()}
        found = [process for process in words if PARTS[part] in words[process]]
        if part == "buffer":  # the command line of a store server also contains the words that find the buffer
            found = [process for process in found if PARTS["store"] not in words[process]]
        if part == "engine" and not found:  # an in-process engine runs in the worker's process
            found = [process for process in words if PARTS["worker"] in words[process]]
        if part in ("supervisor", "controller"):
            own = self.run.process.pid
            found = [process for process in found if (process.pid == own) == (part == "supervisor")]
        if not found:
            self._note(f"… there is no {part}")
            return None
        process = found[int(share * len(found))]
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        if number == signal.SIGKILL:
            self._killed_by_us.add(part)
        self.counts[f"{number.name} {part}"] += 1
        return process

    def _ask_for_checkpoint(self) -> None:
        if not self._has_folder:
            return
        try:
            self._note(f"… {ask_for_checkpoint(self.run.run_dir, timeout_s=30)}")
        except (ValueError, AsyncRLError) as error:  # the run is not training, or a part has just died
            self._note(f"… refused: {error}")

    def _fill(self, event: Event) -> None:
        """Fill the disk for a while. If the run ends and ``event.stays`` is true, resume it on the full disk."""
        filler = self.disk / FILLER
        _take_all_space(filler)
        self._watch(event.length_s)
        if event.stays and self.run.process.poll() is not None:
            self._end()
            self._note("… and the disk stays full")
            _take_all_space(filler)  # when the run ended, it freed some space
            self._begin("transformers")
            self._watch(2 * event.length_s)
        filler.unlink()

    def _watch(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Wait ``seconds``. The wait ends earlier if the run ends, or if ``until()`` returns true.

        Fail if the run makes no progress for too long.
        """
        end_s = time.monotonic() + seconds
        self._look()
        while self.run.process.poll() is None and time.monotonic() < end_s and not until():
            time.sleep(0.2)
            self._look()

    def _look(self) -> None:
        """Read the output and the steps of the run. Fail if no output or no step has come for too long."""
        now_s = time.monotonic()
        if self.run.read_lines():
            self._heard_s = now_s
        if not self._has_folder and any(" writing to " in line for line in self.run.lines):
            self._has_folder = True
            self.lives.append(self.run.run_dir)
        if self._has_folder and (steps := self.run.num_steps - 1) != self._newest_step:
            self._newest_step, self._step_s, self._heard_s = steps, now_s, now_s
        with suppress(psutil.NoSuchProcess):
            self.run.remember_family()
        assert now_s - self._heard_s < SILENCE_S, f"no output for {SILENCE_S:g} s:\n{self._tail()}"
        assert now_s - self._step_s < NO_STEP_S, f"no step for {NO_STEP_S:g} s:\n{self._tail()}"

    def _await(self, is_true: Callable[[], bool], what: str, timeout_s: float) -> None:
        self._watch(timeout_s, until=is_true)
        assert is_true(), f"no {what} within {timeout_s:g} s:\n{self._tail()}"

    def _end(self, *, is_last: bool = False) -> None:
        """Check how the run has ended. Set the options for its next start, which continues from a checkpoint."""
        limit_s = SAVE_TIMEOUT_S + STOP_TIMEOUT_S + 15.0 if "supervisor" in self._killed_by_us else 5.0
        deadline_s = time.monotonic() + limit_s
        while (left := self._processes()) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert not left, f"{[words_of(process)[:200] for process in left]} outlived their run:\n{self._tail()}"
        status = self.run.finish(10)
        self._look()
        # Ray may print more lines after the error
        last = [line for line in self.run.lines if line.startswith("error: ")] or self.run.lines
        words = last[-1] if last else "no output"
        self._note(f"life {self.counts['lives'] - 1} ended with status {status}: {words[:300]}")
        self.counts[f"status {status}"] += 1
        if "supervisor" in self._killed_by_us:
            assert status in (-signal.SIGKILL, 1, 143), self._tail()
        elif status == -signal.SIGTERM:
            assert not self.run.lines, self._tail()  # the signal came before Python could handle signals
        elif status == 128 + signal.SIGTERM:
            assert any("stopped by SIGTERM" in line for line in self.run.lines[-60:]), self._tail()
        elif not is_last or status != 0:
            assert status == 1, self._tail()
            assert any(line.startswith("error: ") for line in self.run.lines[-60:]), self._tail()
        if status != -signal.SIGKILL:
            assert [path.name for path in self.run.scratch.glob("asyncrl-*")] == []
        self._command = self._continued()
        self.run.end()

    def _continued(self) -> list[str]:
        """Return the options for the next start, from the command that the run printed when it ended.

        A killed run does not print a command. Then ``checkpoint.resume=auto`` finds the newest checkpoint.
        """
        named = [line.partition("to continue: asyncrl train ")[2] for line in self.run.lines]
        if command := next(filter(None, reversed(named)), ""):
            self.counts["named commands"] += 1
            options = [one for one in shlex.split(command) if not one.startswith("rollout_fleet.num_engines=")]
            return [one for one in options if not one.startswith(("rollout_fleet.engine=", "total_steps="))] + [
                f"total_steps={TOTAL_STEPS}"
            ]
        return [*self._options, "checkpoint.resume=auto"]

    def checkpoint(self) -> Path | None:
        """Return the newest checkpoint, or None if the run has no checkpoint."""
        folders = [self.disk, *reversed(self.lives)]
        return next(filter(None, (newest_checkpoint(folder / "checkpoints") for folder in folders)), None)

    def _processes(self) -> list[psutil.Process]:
        """Return all current processes of the run, including processes whose parent has died."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                own = process.environ().get("TMPDIR") == str(self.run.scratch)
                if own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _trains(self) -> bool:
        """Return whether the run has reported a step since its latest start."""
        return any(f"/{TOTAL_STEPS}" in line for line in self.run.lines)

    def _note(self, words: str) -> None:
        self.say(f"step {self._newest_step}: {words}")

    def _tail(self) -> str:
        return "\n".join(self.run.lines[-40:])


def _take_all_space(filler: Path) -> None:
    """Extend the file ``filler`` until its disk is full."""
    free = os.statvfs(filler.parent)
    with filler.open("ab") as file, suppress(OSError):  # the run can take some of the space at the same time
        os.posix_fallocate(file.fileno(), file.tell(), free.f_bavail * free.f_frsize)
