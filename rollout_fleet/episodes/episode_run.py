"""One running episode (a rollout with an environment). Its turns continue after aborts and weight updates."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from asyncrl.core.errors import EpisodeEnded, RequestRefused
from asyncrl.core.images import PlacedImage
from asyncrl.core.record import LevelName
from asyncrl.core.types import FinishReason, Prompt
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.engine import NOTHING, Engine, SampleOutput, SampleRequest, cancel
from rollout_fleet.reward_protocol import Rollout

from .environment import EpisodeFailure, Outcome
from .episode import Episode, EpisodeBudget
from .episode_times import TURN_TIMES, EpisodeTimes


class Player(Protocol):
    """Starts environments, and plays episodes with them."""

    @property
    def budget(self) -> EpisodeBudget:
        """The limits of each episode."""
        ...

    def plays(self, prompt: Prompt) -> bool:
        """Return whether an environment plays the rollouts of this prompt. Otherwise a rollout is a single answer."""
        ...

    @property
    def counts(self) -> Counter[str]:
        """Number of events of each kind so far, by the kind's name (`EpisodeCount`)."""
        ...

    def scores(self, failure: EpisodeFailure) -> bool:
        """Return whether reward functions score an episode that failed with ``failure``."""
        ...

    async def start(self) -> None:
        """Start the parts that environments need, such as child processes. Raises the first error."""
        ...

    async def close(self) -> None:
        """Stop everything that `start` has started."""
        ...

    async def play(self, prompt: Prompt, run: EpisodeRun, *, sampling: SamplingConfig, index: int) -> None:
        """Run the environment of one episode to its end, and set ``run.outcome`` or ``run.failure``.

        ``index`` is the index of the episode in its prompt group. ``sampling`` are the options for its turns.
        """
        ...


@dataclass(kw_only=True)
class PromptTokens:
    """Counts the prompt tokens of several requests, and the prompt tokens that were in the engine's cache."""

    num_tokens: int = 0
    num_cached: int = 0


class EpisodeRun:
    """Samples the turns of one episode for the episode's `Session`, which answers the environment.

    The session calls `sample` and waits until the turn has finished::

        session ──sample──▶ EpisodeRun ──ask──▶ owner ──next_requests──▶ engine
           ▲                  │    ▲                                       │
           └──finished turn───┘    └─────────────────take──────────────────┘

    The owner is the rollout loop, or in an evaluation `DirectRun`. The callback ``ask`` tells the owner to send the
    requests of `next_requests` to the engine. The owner passes each answer to `take`. After `end`, all waiting calls
    raise `EpisodeEnded`.

    Attributes:
        episode: The forest of turns.
        outcome: The environment's result; None until there is one.
        failure: The reason why the episode has no outcome.
        metrics: Numbers about the episode to report, by name.
        times: The times of the episode's turns and tools.
        is_replayable: Whether another attempt can continue the episode from its recorded turns.
        later_prompts: Prompt tokens of all turns after the first turn. A request does not count if it continues a
            cut-off turn, or if the engine does not report how many tokens of its prompt were in the cache.

    Args:
        ask: Function that is called when a turn needs the engine. It must not wait.
        vocab_size: Size of the vocabulary. Token ids must be below this number.
        on_place: Function that is called when the property `place` may have changed without a new turn. It must not
            wait.
    """

    def __init__(
        self,
        episode: Episode,
        *,
        ask: Callable[[], None],
        vocab_size: int,
        on_place: Callable[[], None] = lambda: None,
    ) -> None:
        self.episode = episode
        self.outcome: Outcome | None = None
        self.failure: EpisodeFailure | None = None
        self.metrics: dict[str, float] = {}
        self.times = EpisodeTimes()
        self.is_replayable = True
        self.later_prompts = PromptTokens()
        self._ask = ask
        self._on_place = on_place
        self._vocab_size = vocab_size
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._end_reason = ""

    @property
    def is_over(self) -> bool:
        """Whether the environment has ended. The episode then has an outcome or a failure."""
        return self.outcome is not None or self.failure is not None

    @property
    def place(self) -> LevelName:
        """The current state of the episode: it samples turns, waits for a tool or for its environment, or has ended.

        The state of an ended episode is ``tail``: the episode waits for the other episodes of its group.
        """
        if self.is_over:
            return LevelName.tail
        if self.episode.num_running:
            return LevelName.running
        return LevelName.tool if self.times.is_in_tool else LevelName.environment

    def start_afresh(self) -> None:
        """Drop the recorded turns of an earlier attempt, because the environment cannot be replayed."""
        self.is_replayable = False
        self.episode.forget()

    def called(self, names: Sequence[str]) -> None:
        """Record that the environment gets an answer of the policy. The answer calls the tools ``names``, if any."""
        self.times.called(names)
        self._on_place()

    def tool(self, number: int, name: str, is_running: bool) -> None:
        """Record that the call ``number`` of `Policy.run_tool` begins or ends. ``name`` is the name of the tool."""
        self.times.tool(number, name, is_running)
        self._on_place()

    def next_requests(self) -> list[SampleRequest]:
        """Make the requests to send to the engine (`Episode.next_requests`).

        `times` records the time of each first token.
        """
        return [
            replace(request, on_first_token=partial(self.times.first_token, self.episode.turn_of(request.id)))
            for request in self.episode.next_requests()
        ]

    def sampled(self) -> SampleOutput:
        """Return the tokens of all sampled turns as one sample, turn after turn.

        The sample has the finish reason of the last turn. It includes tokens of unfinished turns and of replayed turns.
        It omits dropped turns.
        """
        turns = [self.episode.turn(index) for index in self.episode.sampled]
        return SampleOutput(
            token_ids=np.concatenate([NOTHING.token_ids, *(turn.token_ids for turn in turns)]),
            logprobs=np.concatenate([NOTHING.logprobs, *(turn.logprobs for turn in turns)]),
            versions=np.concatenate([NOTHING.versions, *(turn.versions for turn in turns)]),
            finish_reason=turns[-1].finish_reason if turns else None,
        )

    def rollout(self, decode: Callable[[Sequence[int]], str]) -> Rollout:
        """Return this episode as a `Rollout`, the input of reward functions. ``decode`` converts token ids to text."""
        turns = {index: decode(self.episode.turn(index).token_ids.tolist()) for index in self.episode.sampled}
        last = self.episode.answer
        return Rollout(
            text=(self.outcome and self.outcome.answer) or next(reversed(turns.values()), ""),
            turns=turns,
            num_tokens=self.episode.num_tokens,
            is_truncated=last is not None and last.finish_reason is FinishReason.length,
            outcome=self.outcome,
            failure=str(self.failure or ""),
        )

    def described(self, decode: Callable[[Sequence[int]], str], rewards: Mapping[int, float]) -> dict[str, Any]:
        """Describe the episode as JSON values for people to read: its turns with texts and times, and its tools.

        Args:
            decode: Function that converts token ids to text.
            rewards: Rewards of turns, by their indices.

        Returns:
            ``failure`` and ``duration_s`` of the episode, its ``tools`` as `ToolTimes`, and its ``turns``. A turn has:

            - ``turn``, ``parent`` (-1 for a root), ``is_sampled``, ``num_tokens``, ``reward`` and ``finish_reason``.
            - ``pieces``: policy version and text of each stretch of tokens with one version. Given tokens have -1.
            - The fields of `TurnTimes` in seconds since the episode began; None for given turns.
        """
        turns = []
        for index in self.episode.live:
            turn, times = self.episode.turn(index), self.times.turns.get(index)
            stretches = np.split(turn.token_ids, np.flatnonzero(np.diff(turn.versions)) + 1)
            versions = turn.versions[np.cumsum([0, *map(len, stretches[:-1])])] if len(turn.token_ids) else ()
            pieces = [
                [int(version), decode(stretch.tolist())] for version, stretch in zip(versions, stretches, strict=False)
            ]
            turns.append(
                {
                    "turn": index,
                    "parent": turn.parent,
                    "is_sampled": turn.sampled,
                    "num_tokens": len(turn.token_ids),
                    "pieces": pieces,
                    "reward": rewards.get(index),
                    "finish_reason": str(turn.finish_reason or ""),
                    **(asdict(times) if times is not None else dict.fromkeys(TURN_TIMES)),
                }
            )
        tools = [asdict(tool) for tool in self.times.tools]
        return {
            "failure": str(self.failure or ""),
            "duration_s": self.times.duration_s,
            "turns": turns,
            "tools": tools,
        }

    async def sample(
        self,
        parent: int,
        new_tokens: Sequence[int] | np.ndarray,
        sampling: SamplingConfig,
        images: tuple[PlacedImage, ...] = (),
    ) -> int:
        """Append ``new_tokens`` after the turn ``parent``, and let the engine sample a new turn after these tokens.

        Waits until the new turn is finished, and returns its index. ``new_tokens`` may be empty. If the caller is
        cancelled, the engine still samples the turn.

        Raises:
            EpisodeOverflow: a limit of `EpisodeBudget` is used up. The episode does not change.
            EpisodeEnded: `end` was called before the turn was finished.
            RequestRefused: a token is outside the vocabulary, or the engine refuses the request.
            ValueError: ``parent`` is being sampled or is not a turn in use (`Episode.is_known`). Or ``parent`` is
                `ROOT` and ``new_tokens`` is empty.
        """
        self._check_running()
        self._check_tokens(new_tokens)
        index = self.episode.sample(parent, new_tokens, sampling, images=images)
        self.times.asked(index)
        await self.finished(index)
        return index

    def give(self, parent: int, tokens: Sequence[int] | np.ndarray) -> int:
        """Append a turn of tokens that the policy did not sample (`Episode.give`). Returns the turn's index.

        Raises the errors of `Episode.give`, and `RequestRefused` if a token is outside the vocabulary.
        """
        self._check_tokens(tokens)
        return self.episode.give(parent, tokens)

    async def finished(self, index: int) -> None:
        """Wait until the turn ``index`` is finished. `take`, `refuse` and `end` end this wait.

        Raises `EpisodeEnded` after `end`, and `RequestRefused` if the engine refuses the request.
        """
        if index not in self.episode.running:
            self.times.ended(index)
            return
        self._check_running()
        if index not in self._waiting:
            self._waiting[index] = asyncio.get_running_loop().create_future()
            self._ask()
        await asyncio.shield(self._waiting[index])

    def take(self, request_id: str, output: SampleOutput) -> None:
        """Append the tokens of the engine's answer to the turn of its request.

        If the turn is finished now, calls that wait for it return.
        """
        index = self.episode.turn_of(request_id)
        turn = self.episode.turn(index)
        if output.num_cached is not None and not len(turn.token_ids) and index != next(iter(self.times.turns)):
            self.later_prompts.num_tokens += self.episode.depth(turn.parent)
            self.later_prompts.num_cached += output.num_cached
        self.episode.take(request_id, output)
        if index not in self.episode.running:
            self.times.ended(index)
            if (waiting := self._waiting.pop(index, None)) is not None:
                _wake(waiting)

    def refuse(self, request_id: str, error: RequestRefused) -> None:
        """Drop the turn of a request that the engine refused, and raise ``error`` in calls that wait for the turn."""
        index = self.episode.refuse(request_id)
        if (waiting := self._waiting.pop(index, None)) is not None:
            _wake(waiting, error)

    def end(self, reason: str) -> None:
        """End the episode: later requests, and calls that wait for a turn, raise `EpisodeEnded` with ``reason``.

        If the environment has ended, turns that are being sampled are dropped. A second call does not change the
        reason.
        """
        self._end_reason = self._end_reason or reason
        self.times.end()
        if self.is_over:
            self.episode.abandon()
        for waiting in self._waiting.values():
            _wake(waiting, EpisodeEnded(f"episode {self.episode.name} gets no more answers: {self._end_reason}"))
        self._waiting.clear()

    def _check_tokens(self, tokens: Sequence[int] | np.ndarray) -> None:
        ids = np.asarray(tokens, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            raise RequestRefused(
                f"episode {self.episode.name}: token ids must be in 0..{self._vocab_size - 1}, got {ids.min()}.."
                f"{ids.max()}; encode them with the policy's tokenizer"
            )

    def _check_running(self) -> None:
        if self._end_reason:
            raise EpisodeEnded(f"episode {self.episode.name} gets no more answers: {self._end_reason}")


class DirectRun(EpisodeRun):
    """An episode of an evaluation. It sends its requests directly to an engine, without a rollout loop."""

    def __init__(self, episode: Episode, engine: Engine) -> None:
        super().__init__(episode, ask=self._send, vocab_size=engine.vocab_size)
        self._engine = engine
        self._sending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End the episode, and cancel its requests to the engine."""
        self.end("its environment has ended")
        await cancel(self._sending)

    def _send(self) -> None:
        task = asyncio.create_task(self._generate(self.next_requests()))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _generate(self, requests: Sequence[SampleRequest]) -> None:
        left: list[str] = []
        try:
            while requests:
                left = [request.id for request in requests]
                async for request, output in self._engine.generate(requests):
                    left.remove(request.id)
                    self.take(request.id, output)
                requests = self.next_requests()
        except RequestRefused as refused:  # refuse only these requests; other turns of the episode continue
            for request_id in left:
                self.refuse(request_id, refused)
        except Exception as error:  # noqa: BLE001 - calls that wait for a turn raise this error
            for waiting in self._waiting.values():
                _wake(waiting, error)
            self._waiting.clear()


def _wake(waiting: asyncio.Future[None], error: Exception | None = None) -> None:
    if waiting.done():
        return
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)
        waiting.exception()
