"""The agent of `benchmarks.agent_fleet`. The agent calls a tool between its turns.

This module imports only the standard library.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.core.types import Prompt
    from rollout_fleet.episodes import Policy

RESULT = tuple(range(20, 36))
"""The token ids of a tool's result."""


def tool_seconds(mean: float) -> float:
    """Return a random duration of one tool call in seconds, from 0.5 to 1.5 times ``mean``.

    If all durations were equal, all episodes would call their tools at the same times.
    """
    return mean * random.uniform(0.5, 1.5)


class ToolUser:
    """An agent that samples ``num_turns`` turns.

    After each turn except the last one, the agent calls a tool that takes ``tool_s`` seconds on average.
    """

    def __init__(self, num_turns: int, tool_s: float = 0.0) -> None:
        self._num_turns = num_turns
        self._tool_s = tool_s

    async def run(self, prompt: Prompt, policy: Policy) -> float:
        """Play one episode with ``policy``. Return the reward, which is always 0."""
        turn = await policy.sample([])
        for _ in range(self._num_turns - 1):
            await policy.run_tool(asyncio.sleep(tool_seconds(self._tool_s)), name="wait")
            turn = await policy.sample(RESULT, parent=turn.turn)
        return 0.0
