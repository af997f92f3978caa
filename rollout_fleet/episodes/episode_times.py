"""Records when an episode (a rollout with an environment) waits for the engine, for tools or for its environment.

::

    turn requested ──queue──▶ first token ──generation──▶ last token ──tool or environment──▶ next turn requested

An episode waits for a tool while a call of `Policy.run_tool` runs. After an answer with tool calls, it also waits for a
tool until the next request or answer. At other times without a running turn, it waits for its environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields


@dataclass(kw_only=True, slots=True)
class TurnTimes:
    """When a sampled turn was requested, began and ended, in seconds since the episode began.

    A completely replayed turn takes no time.

    Attributes:
        asked_s: Time when the environment requested the turn.
        first_token_s: Time of the first token that the engine sampled in this attempt; None before this token.
        ended_s: Time of the last token; None while the turn runs.
    """

    asked_s: float
    first_token_s: float | None = None
    ended_s: float | None = None


@dataclass(kw_only=True, slots=True)
class ToolTimes:
    """When one tool call (or all calls of one answer together) began and ended, in seconds since the episode began."""

    name: str
    began_s: float
    ended_s: float | None = None


TURN_TIMES = tuple(field.name for field in fields(TurnTimes))


class EpisodeTimes:
    """Records when the turns and the tool calls of one episode begin and end.

    Attributes:
        turns: The times of each sampled turn, by the turn's index.
        tools: The tool calls, in the order in which they began. The tools of an answer are added when all of them end.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self.turns: dict[int, TurnTimes] = {}
        self.tools: list[ToolTimes] = []
        self._clock = clock
        self._zero_s = clock()
        self._running: dict[int, ToolTimes] = {}
        self._called: ToolTimes | None = None
        self._end_s: float | None = None

    @property
    def is_in_tool(self) -> bool:
        """Whether a tool runs now, as far as this worker knows.

        A tool runs during a call of `Policy.run_tool`. If an answer of the policy calls tools, this worker assumes that
        they run until the environment requests the next turn or gets the next answer, or until the episode ends.
        """
        return bool(self._running) or self._called is not None

    @property
    def now_s(self) -> float:
        """Seconds since the episode began."""
        return self._clock() - self._zero_s

    @property
    def duration_s(self) -> float:
        """Seconds from the beginning of the episode to its end, or until now."""
        return self.now_s if self._end_s is None else self._end_s

    def asked(self, turn: int) -> None:
        """Record that the environment requests the turn with this index now.

        The tool calls of the latest answer are recorded as ended.
        """
        self.turns.setdefault(turn, TurnTimes(asked_s=self.now_s))
        self._end_calls()

    def first_token(self, turn: int) -> None:
        """Record that the first token of a turn arrives now. Only the first call for a turn has an effect."""
        times = self.turns[turn]
        if times.first_token_s is None:
            times.first_token_s = self.now_s

    def ended(self, turn: int) -> None:
        """Record that the last token of a turn arrives now. Only the first call for a turn has an effect."""
        times = self.turns[turn]
        if times.ended_s is None:
            times.ended_s = self.now_s

    def called(self, names: Sequence[str]) -> None:
        """Record that the environment gets an answer now. The answer calls the tools ``names``.

        ``names`` is empty if the answer calls no tool. The tools are assumed to run until the environment requests the
        next turn or gets the next answer, or until the episode ends. If calls of `Policy.run_tool` begin in this time,
        `tools` has only the entries of these calls.
        """
        self._end_calls()
        if names:
            self._called = ToolTimes(name=", ".join(names), began_s=self.now_s)

    def tool(self, number: int, name: str, is_running: bool) -> None:
        """Record that a call of `Policy.run_tool` begins (``is_running``) or ends now.

        ``number`` identifies the call within the episode, and ``name`` is the tool's name.
        """
        if is_running:
            self._running[number] = ToolTimes(name=name, began_s=self.now_s)
            self.tools.append(self._running[number])
        elif (running := self._running.pop(number, None)) is not None:
            running.ended_s = self.now_s

    def end(self) -> None:
        """Record that the episode ends now. Only the first call sets its duration."""
        self._end_calls()
        self._end_s = self.duration_s

    def _end_calls(self) -> None:
        called, self._called = self._called, None
        has_noted = called is not None and bool(self.tools) and self.tools[-1].began_s >= called.began_s
        if called is not None and not has_noted:
            called.ended_s = self.now_s
            self.tools.append(called)
