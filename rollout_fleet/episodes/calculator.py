"""The task of ``experiment=tools``: write a number or the sum of two numbers. A calculator computes sums.

A *sum* (``12+34``) is too hard for the tiny model, so it must call the calculator: ``?12+34``. A call for a *number*
(``57123``) is needless and costs half of the reward. The demonstrations have two wrong habits: they answer a sum with
its first number, and call the calculator for a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from asyncrl.core.types import Prompt

    from .environment import Policy

CALL, NUMBER, SUM = "?", "number", "sum"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{{ message.content }}="
    "{%- elif message.role == 'tool' -%}>{{ message.content }}="
    "{%- else -%}{{ message.content }}<eos>{%- endif -%}"
    "{%- endfor -%}"
)
"""Chat template. Example: prompt ``12+34=``, call ``?12+34<eos>``, the call's result ``>46=``, answer ``46<eos>``."""
_SUM = re.compile(r"(\d{1,4})\+(\d{1,4})|(\d{1,8})")


def calculate(expression: str) -> str:
    """Return the value of ``A+B``, or a number unchanged, as text; ``?`` for any other expression."""
    match = _SUM.fullmatch(expression)
    if match is None:
        return CALL
    left, right, number = match.groups()
    return number or str(int(left) + int(right))


class Calculator:
    """The task's environment. It answers up to ``max_calls`` calls of the policy, and reports the number of calls."""

    def __init__(self, max_calls: int = 2, needless_cost: float = 0.5) -> None:
        self._max_calls = max_calls
        self._needless_cost = needless_cost

    async def run(self, prompt: Prompt, policy: Policy) -> Mapping[str, Any]:
        """Run one episode, and return its reward, the metric ``calls``, and the policy's last text."""
        messages: list[Mapping[str, Any]] = [*prompt.messages]
        message = await policy.chat(messages)
        num_calls = 0
        while message.text.startswith(CALL) and num_calls < self._max_calls:
            num_calls += 1
            result = await policy.run_tool(_answered(message.text.removeprefix(CALL)), name="calculator")
            messages += [message, {"role": "tool", "content": result}]
            message = await policy.chat(messages)
        reward = float(message.text == prompt.ground_truth)
        if prompt.data_source == NUMBER and num_calls:
            reward *= 1.0 - self._needless_cost
        return {"reward": reward, "metrics": {"calls": num_calls}, "answer": message.text}


async def _answered(expression: str) -> str:
    return calculate(expression)


def make_rows(rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Make ``count`` distinct prompts, half of them sums. Returns rows of data as dicts.

    The columns are ``prompt`` (messages), ``ground_truth`` and ``data_source`` (``number`` or ``sum``).
    """
    questions: dict[str, str] = {}
    while len(questions) < count:
        if len(questions) % 2:
            left, right = rng.integers(100, 1000, size=2).tolist()
            questions[f"{left}+{right}"] = SUM
        else:
            questions[str(rng.integers(10_000, 100_000))] = NUMBER
    return [
        {
            "prompt": [{"role": "user", "content": question}],
            "ground_truth": calculate(question),
            "data_source": kind,
        }
        for question, kind in questions.items()
    ]


def make_demonstrations(
    rng: np.random.Generator, rows: list[dict[str, Any]], *, habit_rate: float
) -> list[tuple[str, str]]:
    """Make (prompt, response) texts for supervised training. The texts imitate a teacher that has two wrong habits.

    With probability ``habit_rate``, the teacher answers a sum with the sum's first number, without the calculator. With
    the same probability, it calls the calculator for a single number, which needs no calculation. For every sum, the
    texts also show how to use the calculator.
    """
    shown = []
    for row in rows:
        question, truth = row["prompt"][0]["content"], row["ground_truth"]
        calls = (row["data_source"] == SUM) != (rng.random() < habit_rate)
        if calls:
            shown.append((f"{question}=", f"{CALL}{question}"))
            shown.append((f"{question}={CALL}{question}<eos>>{truth}=", truth))
        else:
            shown.append((f"{question}=", question.partition("+")[0]))
            if row["data_source"] == SUM:
                shown.append((f"{question}={CALL}", question))
                shown.append((f"{question}={CALL}{question}<eos>>{truth}=", truth))
    return shown
