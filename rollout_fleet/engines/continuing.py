"""An engine that continues groups which were begun before: by another worker, or before a weight update."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.protocol.types import FinishReason
from rollout_fleet.types import GenerationRequest, GroupOutput, SampleOutput

from .around import EngineAround
from .base import Engine


@dataclass(eq=False, kw_only=True)
class _Continued:
    """A group whose samples are requests of their own."""

    rid: str
    samples: list[SampleOutput]
    running: dict[str, int]


class ContinuingEngine(EngineAround):
    """Implements `Engine` on another one: a request's ``prefixes`` are continued, each as far as it may still go.

    A sample that is not finished becomes a request of its own, whose prompt is the group's prompt and the sample so
    far; so every engine can serve it. Its answer is what was written before and what was written now, each token with
    the log-prob and the version that it was sampled under.
    """

    def __init__(self, engine: Engine) -> None:
        """Take the engine, which whoever made it starts and stops."""
        super().__init__(engine)
        self._continued: dict[str, _Continued] = {}

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GroupOutput]:
        """See `Engine.generate`."""
        sent: list[GenerationRequest] = []
        groups: dict[str, _Continued] = {}
        finished: list[_Continued] = []
        for request in requests:
            if not request.prefixes:
                sent.append(request)
                continue
            group, rest = _split(request)
            groups.update(dict.fromkeys(group.running, group))
            sent += rest
            if not rest:
                finished.append(group)
        mine = {group.rid: group for group in groups.values()}
        self._continued.update(mine)
        try:
            for group in finished:
                yield GroupOutput(rid=group.rid, samples=tuple(group.samples))
            async for output in self._engine.generate(sent):
                group = groups.get(output.rid)
                if group is None:
                    yield output
                elif _is_whole_with(group, output):
                    yield GroupOutput(rid=group.rid, samples=tuple(group.samples))
        finally:
            for rid, group in mine.items():
                if self._continued.get(rid) is group:  # else it was cut off, and a later call continues it
                    del self._continued[rid]

    async def abort(self, rid: str) -> None:
        """See `Engine.abort`."""
        group = self._continued.get(rid)
        for running in [rid] if group is None else list(group.running):
            await self._engine.abort(running)


def _split(request: GenerationRequest) -> tuple[_Continued, list[GenerationRequest]]:
    """The group, and a request for each of its samples that is to be continued."""
    group = _Continued(rid=request.rid, samples=[], running={})
    rest: list[GenerationRequest] = []
    for index, prefix in enumerate(request.prefixes):
        num_left = request.sampling.max_new_tokens - len(prefix.token_ids)
        if prefix.finish_reason is None and num_left < 1:
            prefix = replace(prefix, finish_reason=FinishReason.length)
        group.samples.append(prefix)
        if prefix.finish_reason is None:
            group.running[_sample_rid(request.rid, index)] = index
            rest.append(
                replace(
                    request,
                    rid=_sample_rid(request.rid, index),
                    prompt_ids=np.concatenate([request.prompt_ids, prefix.token_ids]).astype(np.int32),
                    num_samples=1,
                    sampling=replace(request.sampling, max_new_tokens=num_left),
                    prefixes=(),
                )
            )
    return group, rest


def _is_whole_with(group: _Continued, output: GroupOutput) -> bool:
    """Take the answer for one sample; whether it was the last that was missing."""
    index = group.running.pop(output.rid)
    before, (now,) = group.samples[index], output.samples
    group.samples[index] = SampleOutput(
        token_ids=np.concatenate([before.token_ids, now.token_ids]),
        logprobs=np.concatenate([before.logprobs, now.logprobs]),
        versions=np.concatenate([before.versions, now.versions]),
        finish_reason=now.finish_reason,
    )
    return not group.running


def _sample_rid(rid: str, index: int) -> str:
    """An id of the same width, since engines match ids by prefix.

    Groups that run together differ in what is kept, the last eight digits; a group has at most 1,000 samples.
    """
    return f"c{index:03d}{rid[4:]}"
