"""A calculator as a tool. The policy may call the calculator several times before it answers.

Run this environment with ``rollout_fleet.environment.name=examples/agents/calculator.py:Calculator``. The rows of the
data need ``messages``, and the right answer as the ground truth.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import Any

from asyncrl.core.types import Prompt
from rollout_fleet.episodes import Outcome, Policy, use_tools

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Compute an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "For example (3 + 4) * 5"}},
                "required": ["expression"],
            },
        },
    }
]


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, ``+ - * /`` and parentheses, as text.

    Raises:
        ValueError: the expression has other elements, or a number of 1e12 or more.
        SyntaxError: the text is not an expression.
    """

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number) if abs(number) < 1e12:
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(operand))
        raise ValueError(f"{expression!r} must contain only numbers below 1e12, + - * / and parentheses")

    return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"


class Calculator:
    """An environment with one question per episode. The reward is 1 if the last message is the ground truth."""

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Play one episode, in which the policy may call the calculator.

        Return the reward, the answer and the number of calls.
        """
        messages = await use_tools(policy, prompt.messages, tools=TOOLS, call=self._call)
        answer = messages[-1].text.strip()
        num_calls = sum(message["role"] == "tool" for message in messages)
        return Outcome(reward=float(answer == str(prompt.ground_truth)), metrics={"calls": num_calls}, answer=answer)

    @staticmethod
    async def _call(name: str, arguments: Mapping[str, Any]) -> str:
        return calculate(str(arguments["expression"]))
