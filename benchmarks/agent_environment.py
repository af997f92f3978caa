"""The agent of `benchmarks.agent_fleet`: turns with a tool between two of them. It needs the standard library only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.core.types import Prompt
    from rollout_fleet.episodes import Policy

RESULT = tuple(range(20, 36))
"""Tokens of a tool's result."""


class ToolUser:
    """Samples ``num_turns`` turns; after each but the last one, a tool takes ``tool_s`` seconds."""

    def __init__(self, num_turns: int, tool_s: float = 0.0) -> None:
        self._num_turns = num_turns
        self._tool_s = tool_s

    async def run(self, prompt: Prompt, policy: Policy) -> float:
        """Play one episode."""
        turn = await policy.sample([])
        for _ in range(self._num_turns - 1):
            await policy.run_tool(asyncio.sleep(self._tool_s), name="wait")
            turn = await policy.sample(RESULT, parent=turn.turn)
        return 0.0
