"""Runs one episode without an engine. A script writes the tokens of each turn."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncrl.core.types import FinishReason, Prompt
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.engine import SampleOutput
from rollout_fleet.episodes import ChatRequest, Episode, EpisodeBudget, SampleOptions, Session

USER = {"role": "user", "content": "How warm is it?"}

Script = Callable[[np.ndarray, SamplingConfig], Sequence[int]]
"""A script returns the tokens of a turn, given the engine's prompt and the sampling options."""


class ScriptedTurns:
    """Runs an episode with scripted turns.

    Attributes:
        requests: A pair for each request to the engine: the prompt, and the turn.
        script: Function that returns the tokens of a turn.
        gate: Turns finish only while this event is set.
    """

    def __init__(
        self, prompt_ids: Sequence[int], script: Script, recorded: Any = None, images: Any = (), **budget: int
    ) -> None:
        most = EpisodeBudget(**{"max_turns": 1000, "max_tokens": 1 << 20, "max_context": 1 << 20, **budget})
        prompt_ids = np.asarray(prompt_ids, dtype=np.int32)
        self.episode = Episode("7-0-0", prompt_ids, most, recorded=recorded, images=images)
        self.requests: list[tuple[np.ndarray, int]] = []
        self.samplings: list[SamplingConfig] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.script = script

    async def sample(self, parent: int, new_tokens: Sequence[int], sampling: SamplingConfig, images=()) -> int:
        turn = self.episode.sample(parent, new_tokens, sampling, images=images)
        for request in self.episode.next_requests():
            self.requests.append((request.prompt_ids, turn))
            self.samplings.append(request.sampling)
            ids = list(self.script(request.prompt_ids, request.sampling))[: request.sampling.max_new_tokens]
            await asyncio.sleep(0)
            await self.gate.wait()
            is_stopped = ids[-1] in request.sampling.stop_token_ids or bool(request.sampling.stop)
            output = SampleOutput(
                token_ids=np.asarray(ids, dtype=np.int32),
                logprobs=np.full(len(ids), -0.5, dtype=np.float32),
                versions=np.full(len(ids), 3, dtype=np.int32),
                finish_reason=FinishReason.stop if is_stopped else FinishReason.length,
            )
            self.episode.take(request.id, output)
        return turn

    def give(self, parent: int, tokens: Sequence[int]) -> int:
        return self.episode.give(parent, tokens)


class Talk:
    """A session whose policy answers with one text of ``texts`` after the other. Each letter is one token.

    ``recorded`` is the saved progress of an earlier attempt.
    """

    def __init__(self, renderer, *texts, prompt=(USER,), tools=(), most=512, recorded=None, refuses=False, **budget):
        self.renderer = renderer
        self.texts = list(texts)
        ids = np.asarray(renderer.render(list(prompt), list(tools)), dtype=np.int32)
        self.turns = ScriptedTurns(ids, self.write, recorded, **budget)
        self.prompt = Prompt(group_id=7, prompt_ids=ids)
        sampling = SamplingConfig(max_new_tokens=most)
        self.session = Session(self.turns, renderer, sampling=sampling, prompt=self.prompt, refuses=refuses)

    def write(self, prompt_ids, sampling):
        """Return the tokens of the next text: one token per special token, and one token per letter of other text.

        Encoding the whole text would give other tokens.
        """
        text = self.texts.pop(0)
        tokenizer = self.renderer.tokenizer
        special = sorted({*tokenizer.all_special_tokens, "<think>", "</think>", "<tool_call>", "</tool_call>"})
        ids = []
        while text:
            token = next((token for token in special if text.startswith(token)), text[0])
            ids += tokenizer.encode(token)
            text = text[len(token) :]
        return ids

    async def chat(self, *messages, tools=(), key="", is_retry=False, **options):
        request = ChatRequest(
            messages=messages, tools=tools, options=SampleOptions(**options), key=key, is_retry=is_retry
        )
        return await self.session.chat(request)

    def check(self):
        """Check that each prompt of the engine is the path to the new turn.

        This shows that sampled tokens were used directly, and were not decoded and encoded again.
        """
        for prompt, turn in self.turns.requests:
            episode = self.turns.episode
            assert np.array_equal(prompt, episode.path(episode.turn(turn).parent))
