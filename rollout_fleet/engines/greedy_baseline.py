"""An engine that decodes one more response of every prompt group, greedily: ReMax's baseline (arXiv 2310.10505)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from rollout_fleet.types import GenerationRequest, GroupOutput

from .around import EngineAround


class GreedyBaselineEngine(EngineAround):
    """Implements `Engine` on another one: each answer has a last sample of its own, decoded at temperature 0.

    The greedy sample is a request of its own, so that every engine can serve it; the answer waits for both. Its tokens
    are in nobody's account: it is scored and never trained on.
    """

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GroupOutput]:
        """See `Engine.generate`; ``num_baselines`` of each answer is 1."""
        greedy = [
            replace(
                request,
                rid=_greedy_rid(request.rid),
                num_samples=1,
                prefixes=(),
                sampling=replace(request.sampling, temperature=0.0, top_p=1.0, top_k=-1),
            )
            for request in requests
        ]
        partner = {request.rid: _greedy_rid(request.rid) for request in requests}
        partner |= {greedy: rid for rid, greedy in partner.items()}
        waiting: dict[str, GroupOutput] = {}
        async for output in self._engine.generate([*requests, *greedy]):
            other = waiting.pop(partner[output.rid], None)
            if other is None:
                waiting[output.rid] = output
                continue
            sampled, baseline = (other, output) if output.rid.startswith(_GREEDY) else (output, other)
            yield GroupOutput(rid=sampled.rid, samples=sampled.samples + baseline.samples, num_baselines=1)

    async def abort(self, rid: str) -> None:
        """See `Engine.abort`."""
        await self._engine.abort(rid)
        await self._engine.abort(_greedy_rid(rid))


_GREEDY = "g"


def _greedy_rid(rid: str) -> str:
    """An id of the same width, since engines match ids by prefix; a group's own begins with a digit."""
    return _GREEDY + rid[1:]
