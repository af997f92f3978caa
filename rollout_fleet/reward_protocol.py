"""The arguments, results and names of reward functions, and the way to call them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from asyncrl.core.registry import Registry
from asyncrl.core.types import Prompt

if TYPE_CHECKING:
    from .episodes.environment import Outcome

FIRST_TURN = 1
"""Index of the only sampled turn of a single answer; the prompt is turn 0."""
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One finished rollout: the input of reward functions.

    Attributes:
        text: Text to score, without special tokens: `Outcome.answer`, or the last sampled turn if `answer` is empty.
        turns: The text of each sampled turn by its index in the episode. Example: ``{1: "call", 3: "answer"}``.
        num_tokens: Number of tokens that the policy wrote in all turns; None if they were not counted.
        is_truncated: Whether the last turn ended because it reached its largest length.
        outcome: What the environment reported; None without an environment, or if the episode failed.
        failure: Why the episode failed and has no outcome; otherwise empty.
    """

    text: str
    turns: Mapping[int, str] = field(default_factory=dict)
    num_tokens: int | None = None
    is_truncated: bool = False
    outcome: Outcome | None = None
    failure: str = ""

    @classmethod
    def answer(cls, text: str, *, num_tokens: int | None = None, is_truncated: bool = False) -> Rollout:
        """Make a rollout that consists of one answer to the prompt, with the text ``text``."""
        return cls(text=text, turns={FIRST_TURN: text}, num_tokens=num_tokens, is_truncated=is_truncated)


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of a reward function that also rewards turns. Other functions may return a number.

    Attributes:
        reward: Reward of the whole rollout, without ``turn_rewards``.
        turn_rewards: Additional rewards of single turns, by the turn's index in `Rollout.turns`.
    """

    reward: float = 0.0
    turn_rewards: Mapping[int, float] = field(default_factory=dict)

    @property
    def sum(self) -> float:
        """The whole reward of the rollout: ``reward`` plus all ``turn_rewards``."""
        return self.reward + sum(self.turn_rewards.values())


class Reward(Protocol):
    """Scores one response.

    Built-in rewards that cannot hang run in the rollout worker. All other rewards run in a scoring process.

    The name of the second parameter selects what the function gets:

    - ``rollout`` gets the `Rollout`.
    - ``rollouts`` gets the list of all rollouts of the prompt. The function then returns one score per rollout.
    - Any other name gets the response's text.

    An ``async`` function that takes one response is called concurrently for all responses to a prompt. A class is
    instantiated once per process with the reward's options, and the instance is called.
    """

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        """Return the reward of one response, a finite number.

        ``prompt`` has the ground truth. ``response_text`` is the response without special tokens.
        """
        ...


REWARDS: Registry[Reward] = Registry("rollout_fleet.reward")

Answer = Score | str
"""The score of one response, or a text that says why scoring failed."""


class BoundReward:
    """A reward function together with its options.

    Args:
        name: Name of the function, in the form of ``rollout_fleet.reward``.
        options: Keyword arguments of the function after its first two parameters, or of the class.
        is_made: Whether to instantiate a class now. Otherwise the options of the class are only checked. No effect on a
            function.

    Attributes:
        is_async: Whether the function is a coroutine function.

    Raises:
        ValueError: the function does not exist, or its options do not fit.
    """

    def __init__(self, name: str, options: Mapping[str, Any] | None = None, *, is_made: bool = True) -> None:
        self._name = name
        given = dict(options or {})
        function: Any = REWARDS.get(name)
        is_class = isinstance(function, type)
        self._check_can_be_called(function, is_class=is_class)
        self._check_options(function, given, num_positional=0 if is_class else 2)
        called = function.__call__ if is_class else function
        names = [*_parameters(called)][1 if is_class else 0 :]
        self._takes = names[1] if len(names) > 1 else ""
        self.is_async = any(map(inspect.iscoroutinefunction, (called, getattr(called, "__call__", None))))  # noqa: B004
        self._call: Any = None if is_class else partial(function, **given)
        if is_class and is_made:
            try:
                self._call = function(**given)
            except (TypeError, ValueError, ImportError) as error:
                raise ValueError(f"reward {name}: {error}") from error

    @property
    def takes_group(self) -> bool:
        """Whether the function takes all rollouts of a prompt in one call (its second parameter is ``rollouts``)."""
        return self._takes == "rollouts"

    async def start(self) -> None:
        """Call the method ``start`` of the reward, if it has one. Call this method before `answers`."""
        start = getattr(self._call, "start", None)
        if start is not None:
            await start()

    async def answers(
        self, prompt: Prompt, rollouts: Sequence[Rollout], *, may_fail: bool = False
    ) -> AsyncIterator[Answer]:
        """Score the rollouts of one prompt. Yields one `Answer` per rollout, in order.

        If a rollout cannot be scored, its answer is a text with the cause. If ``may_fail`` is false, the scoring ends
        after this answer.
        """
        if self.takes_group:
            for answer in await self._group_answers(prompt, rollouts):
                yield answer
                if isinstance(answer, str) and not may_fail:
                    return
            return
        asked = [self._one_answer(prompt, rollout) for rollout in rollouts] if self.is_async else []
        tasks = [asyncio.ensure_future(one) for one in asked]
        try:
            for place, rollout in enumerate(rollouts):
                answer = await (tasks[place] if tasks else self._one_answer(prompt, rollout))
                yield answer
                if isinstance(answer, str) and not may_fail:
                    return
        finally:
            for task in tasks:
                task.cancel()

    async def _one_answer(self, prompt: Prompt, rollout: Rollout) -> Answer:
        try:
            value = self._call(prompt, rollout if self._takes == "rollout" else rollout.text)
            return _as_answer(await value if inspect.isawaitable(value) else value, rollout)
        except Exception as error:  # noqa: BLE001 - the error of a user's function fails only this group
            return f"raised {error!r}; fix it, or filter such prompts"

    async def _group_answers(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Answer]:
        try:
            values = self._call(prompt, list(rollouts))
            values = await values if inspect.isawaitable(values) else values
            if isinstance(values, (Mapping, Set)):
                failure = f"returned a {type(values).__name__}; it must return a list of scores, one per rollout"
            else:
                values = values.tolist() if hasattr(values, "tolist") else list(values)
                if len(values) == len(rollouts):
                    return list(map(_as_answer, values, rollouts))
                failure = f"returned {len(values)} scores; it must return one per rollout, {len(rollouts)}"
        except Exception as error:  # noqa: BLE001 - the error of a user's function fails only this group
            failure = f"raised {error!r}; fix it, or filter such prompts"
        return [failure] * len(rollouts)

    def _check_can_be_called(self, function: Any, *, is_class: bool) -> None:
        where = f"rollout_fleet.reward={self._name}"
        if is_class:
            if not any("__call__" in vars(base) for base in function.__mro__):
                raise ValueError(f"{where} must have a method __call__(self, prompt, response_text), got none; add it")
            return
        try:
            inspect.signature(function).bind_partial(None, None)
        except TypeError:
            found = _parameters(function)
            raise ValueError(
                f"{where} must take a prompt and a response, got the parameters {found}; correct them"
            ) from None
        except ValueError:  # some functions written in C have no signature
            return

    def _check_options(self, function: Any, given: Mapping[str, Any], *, num_positional: int) -> None:
        try:
            inspect.signature(function).bind(*[None] * num_positional, **given)
        except TypeError as error:
            known = [*_parameters(function)][num_positional:]
            option = f"rollout_fleet.reward_options.{self._name.rpartition(':')[2]}"
            raise ValueError(
                f"{option} must fit the options {known} of reward {self._name}, got {dict(given)}: {error}; correct it"
            ) from error
        except ValueError:  # some functions written in C have no signature
            return


def _parameters(function: Any) -> list[str]:
    try:
        return [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # some functions written in C have no signature
        return []


def _as_answer(value: Any, rollout: Rollout) -> Answer:
    """Convert a reward's result to a `Score`. Returns an error text if the result has a wrong type or value."""
    outcome, turns = (value.reward, value.turn_rewards) if isinstance(value, Score) else (value, {})
    numbers = [number for one in (outcome, *turns.values()) if (number := _as_number(one)) is not None]
    if len(numbers) < 1 + len(turns):
        return f"returned {value!r}; it must return one finite number per response"
    known = {*rollout.turns, *(rollout.outcome.turn_rewards if rollout.outcome is not None else ())}
    if strange := sorted(set(turns) - known):
        return f"returned rewards of turns {strange}; the turns of this rollout are {sorted(rollout.turns)}"
    return Score(reward=numbers[0], turn_rewards=dict(zip(map(int, turns), numbers[1:], strict=True)))


def _as_number(value: Any) -> float | None:
    with suppress(TypeError, ValueError):
        if not isinstance(value, (str, bytes)) and getattr(value, "ndim", 0) == 0:
            value = float(value)
    return value if isinstance(value, float) and abs(value) <= _LARGEST else None
