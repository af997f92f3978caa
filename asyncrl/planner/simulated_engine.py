"""Simulated engines and shared CPU cores.

Between two events, all running samples of an engine decode at the same speed. Therefore an engine needs only one
counter, its *progress*: how many tokens a sample would have if it had run since the start of the simulation. Engines
that take batches do not use the counter, because all samples of a batch end together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush

import simpy

from asyncrl.planner.scenario import EngineModel
from asyncrl.planner.simulated_buffer import call_after
from rollout_fleet.config import OnUpdate


@dataclass(kw_only=True, slots=True, eq=False)
class SimulatedGroup:
    """A prompt group on an engine.

    Attributes:
        lengths: Final number of tokens of each sample.
        to_write: Number of tokens that each unfinished sample must still generate at the start of this attempt.
        oldest_version: Policy version that generated the group's first token; -1 before the group begins.
        newest_version: Policy version at the end of the sample that ended last; -1 before a sample ends.
        written: Number of tokens that this attempt generated for samples that have ended.
        on_cut: The callback that was passed to `SimulatedEngine.cut`; None before that call.
        cut_at: Time of the call of `SimulatedEngine.cut`, in simulated seconds.
    """

    group_id: int
    attempt: int
    lengths: list[int]
    to_write: list[int]
    num_left: int = 0
    oldest_version: int = -1
    newest_version: int = -1
    has_begun: bool = False
    is_revoked: bool = False
    written: int = 0
    on_cut: Callable[[list[int]], None] | None = None
    cut_at: float = 0.0

    @property
    def num_saved(self) -> int:
        """Number of the group's tokens that earlier attempts generated and saved."""
        return sum(self.lengths) - sum(self.to_write)


@dataclass(order=True, slots=True)
class _Running:
    """A running sample.

    Attributes:
        ends_at: The sample ends when the engine's counter ``_progress`` has this value. The counter is the number of
            tokens that a sample would have if it had run since the start of the simulation.
        place: Position of the sample in the order in which the engine started its samples, from 1.
        weight: What the sample adds to the engine's load, in samples. It is 1 without ``whole_groups``. Otherwise the
            sample represents its group, and ``weight`` is the mean number of running samples of the group.
    """

    ends_at: float
    place: int
    group: SimulatedGroup = field(compare=False)
    length: int = field(compare=False)
    weight: float = field(compare=False)


class SimulatedEngine:
    """A simulated engine with the speed of ``model``, an `EngineModel`.

    Args:
        on_update: What the engine does with the KV cache of running samples after a weight update.
        prompt_tokens: Tokens of a prompt. The engine computes their KV cache once per group. Engines that take batches
            ignore this number.
        whole_groups: Simulate only the longest sample of a group (``Scenario.whole_groups``).
        after: A function that takes seconds of work and a callback. It calls the callback when the work is done.
        vary: Maps the expected time of a batch to its simulated time.

    Attributes:
        loading_s: Total time of the pauses to load weights, in simulated seconds.
        prefill_s: Total time to recompute KV caches after weight updates, in simulated seconds.
    """

    def __init__(
        self,
        env: simpy.Environment,
        model: EngineModel,
        *,
        on_update: OnUpdate,
        prompt_tokens: float,
        whole_groups: bool,
        on_finished: Callable[[SimulatedGroup], None],
        after: Callable[[float, Callable[[], None]], None] | None = None,
        vary: Callable[[float], float] = lambda seconds: seconds,
    ) -> None:
        self.version = 0
        self.loading_s = self.prefill_s = self.num_tokens = 0.0
        self._env, self._model, self._on_finished = env, model, on_finished
        self._after, self._vary = after or partial(call_after, env), vary
        self._recomputes = on_update is OnUpdate.recompute
        self._prompt_tokens, self._whole_groups = prompt_tokens, whole_groups
        self._running: list[_Running] = []
        self._waiting: deque[tuple[SimulatedGroup, int, float]] = deque()
        # `_load` is the sum of `_Running.weight` over all running samples.
        self._load = 0.0
        # `_begun` is a sum over all running samples: `_Running.weight` times `_progress` at the start of the sample.
        # The method `_loaded` computes the number of tokens in the KV cache from `_begun`.
        self._begun = 0.0
        self._progress = self._seen_at = self._stalled_until = 0.0
        self._place = self._timer = 0
        self._is_loading = False
        self._pending_load: tuple[int, float, Callable[[], None]] | None = None

    def paused_s(self) -> float:
        """Return the total time that the engine has paused so far to load weights, in simulated seconds."""
        self._advance()
        return self.loading_s

    def add(self, groups: list[SimulatedGroup]) -> None:
        """Queue the samples of ``groups``. A sample starts as soon as the engine has room and loads no weights.

        An engine that takes batches starts samples only together, as a batch.
        """
        for group in groups:
            if self._whole_groups:
                longest = max(group.to_write)
                group.num_left = 1
                self._waiting.append((group, longest, sum(group.to_write) / longest))
            else:
                group.num_left = len(group.to_write)
                self._waiting.extend((group, length, 1.0) for length in group.to_write)
        self._advance()
        self._begin_waiting()
        self._set_timer()

    def revoke(self, group: SimulatedGroup) -> int:
        """Stop and remove all samples of a group; return how many tokens of the group this engine has decoded.

        An engine that takes batches does not count the tokens of the running batch.
        """
        self._advance()
        group.is_revoked = True
        num_tokens = group.written
        kept = []
        for sample in self._running:
            if sample.group is group:
                begun = round(max(0.0, sample.length - (sample.ends_at - self._progress)) * sample.weight)
                num_tokens += begun
                self.num_tokens += begun
                self._leave(sample)
            else:
                kept.append(sample)
        heapify(kept)
        self._running = kept
        if not kept:
            self._load = self._begun = 0.0
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not group)
        self._begin_waiting()
        self._set_timer()
        return num_tokens

    def cut(self, group: SimulatedGroup, on_cut: Callable[[list[int]], None]) -> None:
        """Stop a group so that another engine can continue the group.

        After the next decoding step, the engine calls ``on_cut`` with the number of missing tokens of each unfinished
        sample. An engine that takes batches calls ``on_cut`` at the end of the batch, if a sample is unfinished.
        """
        self._advance()
        group.on_cut, group.cut_at = on_cut, self._env.now
        if self._model.takes_batches:
            return
        running = [sample for sample in self._running if sample.group is group]
        left = [length for waiting, length, _ in self._waiting if waiting is group]
        left += [max(1, round(sample.ends_at - self._progress)) for sample in running]
        if self._whole_groups:
            longest = max(group.to_write)
            left = [length - (longest - left[0]) for length in group.to_write if length > longest - left[0]]
        step_s = self._token_s()
        self.revoke(group)
        call_after(self._env, step_s, lambda: on_cut(left))

    def load(self, version: int, load_s: float, on_loaded: Callable[[], None]) -> None:
        """Load the weights of the policy version ``version``, and call ``on_loaded`` at the end.

        The engine pauses while it loads. This takes ``load_s`` seconds if the engine has its CPU core alone, and longer
        if the engine shares the core. An engine that takes batches finishes its running batch before it loads.
        """
        self._advance()
        if self._model.takes_batches and self._running:
            self._pending_load = version, load_s, on_loaded
            return
        self._is_loading = True
        self._set_timer()
        self._after(load_s, lambda: self._loaded(version, on_loaded))

    def _loaded(self, version: int, on_loaded: Callable[[], None]) -> None:
        self._advance()
        self._is_loading = False
        self.version = version
        if self._recomputes and not self._model.takes_batches:
            num_cached = self._load * (self._prompt_tokens + self._progress) - self._begun
            recompute_s = max(0.0, num_cached) * self._model.prefill_s_per_token
            self.prefill_s += recompute_s
            self._stall(recompute_s)
        self._begin_waiting()
        self._set_timer()
        on_loaded()

    def _stall(self, seconds: float) -> None:
        self._stalled_until = max(self._env.now, self._stalled_until) + seconds

    # Decoding

    def _advance(self) -> None:
        now = self._env.now
        if self._is_loading:
            self.loading_s += now - self._seen_at
        elif self._running and not self._model.takes_batches:
            wrote_s = now - max(self._seen_at, min(now, self._stalled_until))
            self._progress += wrote_s / self._token_s()
        self._seen_at = now

    def _token_s(self) -> float:
        return self._model.step_s + self._model.step_s_per_sample * self._load

    def _begin_waiting(self) -> None:
        if self._is_loading or not self._waiting:
            return
        if self._model.takes_batches:
            if not self._running and self._pending_load is None:
                self._begin_batch()
            return
        while self._waiting and (self._load + self._waiting[0][2] <= self._model.max_running or not self._running):
            self._begin(*self._waiting.popleft())

    def _begin(self, group: SimulatedGroup, length: int, weight: float) -> None:
        if not group.has_begun:
            group.has_begun = True
            group.oldest_version = self.version if group.oldest_version < 0 else group.oldest_version
            if self._prompt_tokens and not self._model.takes_batches:
                self._stall((self._prompt_tokens + group.num_saved) * self._model.prefill_s_per_token)
        self._place += 1
        heappush(self._running, _Running(self._progress + length, self._place, group, length, weight))
        self._load += weight
        self._begun += weight * self._progress

    def _begin_batch(self) -> None:
        """Start a batch with all samples that fit. All samples of the batch end at the same time as the longest one."""
        longest = 0
        while self._waiting and self._load < self._model.max_running:
            group, length, weight = self._waiting.popleft()
            longest = max(longest, length if group.on_cut is None else 1)
            self._begin(group, length, weight)
        self._timer += 1
        timer = self._timer
        began_at, num_steps = self._env.now, self._model.batch_s / self._token_s() + longest
        batch_s = self._vary(num_steps * self._token_s())

        def steps_until(moment: float) -> int:
            """Return how many decoding steps the batch had completed at ``moment``, in simulated seconds.

            Each decoding step adds one token to each running sample. The function must be called at the end of the
            batch, because the function uses the present time as the end.
            """
            passed = (moment - began_at) / max(self._env.now - began_at, 1e-9) * num_steps
            return max(0, int(passed - (num_steps - longest)))

        self._after(batch_s, lambda: self._end_batch(timer, steps_until))

    def _end_batch(self, timer: int, steps_until: Callable[[float], int]) -> None:
        if timer != self._timer:
            return
        self._advance()
        finished, self._running = self._running, []
        self._load = self._begun = 0.0
        done, cut = [], dict[int, tuple[SimulatedGroup, list[int]]]()
        for sample in finished:
            group = sample.group
            left = sample.length - max(1, steps_until(group.cut_at)) if group.on_cut is not None else 0
            if left > 0:
                cut.setdefault(id(group), (group, []))[1].append(left)
            elif self._write(sample):
                done.append(group)
        if self._pending_load is not None:
            pending, self._pending_load = self._pending_load, None
            self.load(*pending)
        for group, left in cut.values():
            left += [length for waiting, length, _ in self._waiting if waiting is group]
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not group)
            if group.on_cut is not None and not group.is_revoked:
                group.on_cut(left)
        self._begin_waiting()
        for group in done:
            self._on_finished(group)

    def _set_timer(self) -> None:
        if self._model.takes_batches:
            return
        self._timer += 1  # this disables the earlier timer, because a timer with an old number does nothing
        timer = self._timer
        if self._is_loading or not self._running:
            return
        left = max(0.0, self._running[0].ends_at - self._progress) * self._token_s()
        stalled = max(0.0, self._stalled_until - self._env.now)
        call_after(self._env, stalled + left, lambda: self._end_sample(timer))

    def _end_sample(self, timer: int) -> None:
        if timer != self._timer:
            return
        self._advance()
        first = self._running[0].ends_at
        self._progress = max(self._progress, first)
        done = []
        while self._running and self._running[0].ends_at <= first + 1e-9:
            sample = heappop(self._running)
            self._leave(sample)
            if self._write(sample):
                done.append(sample.group)
        self._begin_waiting()
        self._set_timer()
        for group in done:
            self._on_finished(group)

    def _leave(self, sample: _Running) -> None:
        self._load -= sample.weight
        self._begun -= sample.weight * (sample.ends_at - sample.length)
        if not self._running:  # set `_load` and `_begun` to 0, because these sums may have rounding errors
            self._load = self._begun = 0.0

    def _write(self, sample: _Running) -> bool:
        group = sample.group
        num_tokens = round(sample.length * sample.weight)
        self.num_tokens += num_tokens
        group.written += num_tokens
        group.num_left -= 1
        group.newest_version = self.version
        return group.num_left == 0 and not group.is_revoked


# Cores


class SharedCore:
    """A CPU core that all its jobs share equally (processor sharing).

    The work of a job is the number of seconds that the job takes alone.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []
        self._done_s = self._seen_at = 0.0
        self._number = self._timer = 0
        self.busy_s = 0.0

    @property
    def num_running(self) -> int:
        """Number of jobs on the core now."""
        return len(self._jobs)

    def run(self, work_s: float, then: Callable[[], None]) -> None:
        """Start a job of ``work_s`` seconds of work. Call ``then`` at the end of the job."""
        self._advance()
        self._number += 1
        heappush(self._jobs, (self._done_s + work_s, self._number, then))
        self._set_timer()

    def _advance(self) -> None:
        passed_s, self._seen_at = self._env.now - self._seen_at, self._env.now
        if self._jobs:
            self.busy_s += passed_s
            self._done_s += passed_s / len(self._jobs)

    def _set_timer(self) -> None:
        self._timer += 1  # this disables the earlier timer, because a timer with an old number does nothing
        if self._jobs:
            timer, left_s = self._timer, max(0.0, self._jobs[0][0] - self._done_s) * len(self._jobs)
            call_after(self._env, left_s, lambda: self._end_first(timer))

    def _end_first(self, timer: int) -> None:
        if timer != self._timer:
            return
        self._advance()
        self._done_s = max(self._done_s, self._jobs[0][0])
        _, _, then = heappop(self._jobs)
        self._set_timer()
        then()


class SimulatedHost:
    """The two cores of a host: all engines share one core, and all ranks share the other (`HostModel`)."""

    def __init__(self, env: simpy.Environment) -> None:
        self.engines, self.ranks = SharedCore(env), SharedCore(env)
        self._last = self.ranks

    def other(self, work_s: float, *, num_slices: int = 1) -> None:
        """Run ``work_s`` seconds of work of a process other than engines and ranks, such as the buffer.

        ``num_slices`` equal slices run one after another. Each slice takes the core that has fewer jobs at its start.
        If both cores have equally many jobs, the slice takes the core that the previous slice did not take.
        """
        if not work_s or not num_slices:
            return
        turns = (self.ranks, self.engines) if self._last is self.engines else (self.engines, self.ranks)
        self._last = min(turns, key=lambda core: core.num_running)
        left_s = work_s * (num_slices - 1) / num_slices
        self._last.run(work_s / num_slices, lambda: self.other(left_s, num_slices=num_slices - 1))
