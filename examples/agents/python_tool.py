"""A Python interpreter as a tool. The policy's programs run in a sandbox, without a network.

Run this environment with ``rollout_fleet.environment.name=examples/agents/python_tool.py:PythonTool``. The rows of the
data need ``messages``. A reward function scores the last message, for example ``rollout_fleet.reward=numeric``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.core.types import Prompt
from rollout_fleet.episodes import Outcome, Policy, use_tools
from rollout_fleet.sandbox import EndedBy, Sandbox, SandboxLimits, SandboxResult

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run a Python program, and return what it prints. Each program starts anew.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "For example print(6 * 7)"}},
                "required": ["code"],
            },
        },
    }
]


def describe(result: SandboxResult, max_chars: int) -> str:
    """Return the text that the policy gets about a program: its output, and the reason if the program failed.

    An output of more than ``max_chars`` characters is cut in the middle.
    """
    printed = "\n".join(filter(None, [result.stdout.strip(), result.stderr.strip()]))
    if len(printed) > max_chars:
        half = max_chars // 2
        printed = f"{printed[:half]}\n[{len(printed) - 2 * half} characters left out]\n{printed[-half:]}"
    if result.is_success:
        return printed or "the program printed nothing"
    by_limit = result.ended_by not in (EndedBy.exit, EndedBy.signal)
    end = f"the limit of {result.ended_by} ended the program" if by_limit else f"exit status {result.exit_status}"
    return f"{printed}\n[{end}]".lstrip()


class PythonTool:
    """In each episode, the policy answers one question. Before the answer, the policy may run programs.

    Reward functions score the answer.

    Args:
        wall_time_s: Seconds that a program may take. ``rollout_fleet.environment.tool_timeout_s`` must be larger.
        memory_mb: Memory that a program may use.
        max_chars: The policy gets at most this many characters of a program's output.
        kind: Kind of sandbox, see `rollout_fleet.sandbox.SandboxKind`.
    """

    def __init__(
        self, wall_time_s: float = 10.0, memory_mb: int = 512, max_chars: int = 2000, kind: str = "auto"
    ) -> None:
        limits = SandboxLimits(wall_time_s=wall_time_s, cpu_time_s=wall_time_s, memory_bytes=memory_mb << 20)
        self._sandbox = Sandbox(kind=kind, limits=limits)
        self._max_chars = max_chars

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Play one episode. Return the policy's answer, how many programs ran, and how many of them failed."""
        await self._sandbox.start()  # This call fails if this machine cannot isolate programs.
        results: list[SandboxResult] = []

        async def call(_name: str, arguments: Mapping[str, Any]) -> str:
            results.append(await self._sandbox.run(str(arguments["code"])))
            return describe(results[-1], self._max_chars)

        messages = await use_tools(policy, prompt.messages, tools=TOOLS, call=call)
        num_failed = sum(not result.is_success for result in results)
        metrics = {"programs": len(results), "failed_programs": num_failed}
        return Outcome(answer=messages[-1].text.strip(), metrics=metrics)
