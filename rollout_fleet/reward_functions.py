"""The built-in reward functions."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from typing import Any

from asyncrl.core.types import Prompt

from .reward_protocol import REWARDS, Rollout, Score
from .sandbox import Sandbox, SandboxKind, SandboxLimits

FUNCTIONS_IN_PROCESSES = frozenset({"code", "format", "judge", "math_verify"})
"""Built-in rewards that can hang or wait. They run in scoring processes instead of the rollout worker."""
_DECIMAL = r"[-\u2212]?(?:\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+)"
_NUMBER = re.compile(_DECIMAL)
_QUANTITY = re.compile(_DECIMAL + r"(?:[eE][+-]?\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?")
_FENCE = "```"
_TAGGED = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"


@REWARDS.register("exact_match")
def exact_match(prompt: Prompt, response_text: str) -> float:
    """Return 1.0 if the response's text, without special tokens, equals the prompt's ground truth, else 0.0."""
    return 1.0 if response_text == prompt.ground_truth else 0.0


@REWARDS.register("last_number")
def last_number(prompt: Prompt, response_text: str) -> float:
    """Return 1.0 if the last number in the response equals the ground truth, else 0.0.

    Commas in numbers are ignored. Example: ``$1,250.`` is 1250.
    """
    numbers = _NUMBER.findall(response_text)
    return float(bool(numbers) and _as_number(numbers[-1]) == _as_number(str(prompt.ground_truth)))


@REWARDS.register("final_answer")
def final_answer(prompt: Prompt, response_text: str) -> float:
    r"""Return 1.0 if the response's final answer is the ground truth, else 0.0.

    The final answer is in the last ``\boxed{…}``, or else after the last ``Answer:``. Decimal numbers are compared by
    value: ``0.50`` equals ``0.5``. All other answers are compared as text, without spaces and ``$``. A fraction is
    compared as text, so ``1/2`` does not equal ``0.5``.
    """
    written, expected = (re.sub(r"[\s$]|\.$", "", text) for text in (_final(response_text), str(prompt.ground_truth)))
    number = _as_number(expected)
    return float(written == expected or (number is not None and _as_number(written) == number))


@REWARDS.register("numeric")
def numeric(prompt: Prompt, response_text: str, *, relative: float = 1e-4, absolute: float = 1e-8) -> float:
    r"""Return 1.0 if the response's number is close to the ground truth, else 0.0.

    The response's number is the last number in ``\boxed{…}`` or after ``Answer:``, otherwise the last number of the
    text. Examples: ``3/4``, ``1.5e-3``. The number is close if its distance to the ground truth is at most ``relative``
    times the ground truth, or at most ``absolute``.

    Raises `ValueError` if the ground truth has no number.
    """
    expected = _quantities(str(prompt.ground_truth))
    if not expected:
        raise ValueError(f"the ground truth must be a number, got {prompt.ground_truth!r}")
    written = _quantities(_final(response_text)) or _quantities(response_text)
    if not written:
        return 0.0
    return float(abs(written[-1] - expected[-1]) <= max(relative * abs(expected[-1]), absolute))


@REWARDS.register("length")
class Length:
    """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), between -1.0 and 0.0.

    A response of up to ``max_tokens - buffer_tokens`` tokens gets 0. For longer responses the value falls linearly to
    -1 at ``max_tokens``. Example: ``max_tokens=100`` and ``buffer_tokens=20`` give 0, -0.5 and -1 for 80, 90 and 100
    tokens. The tokens of all sampled turns count.
    """

    def __init__(self, *, max_tokens: int, buffer_tokens: int) -> None:
        if not 0 < buffer_tokens <= max_tokens:
            raise ValueError(f"buffer_tokens must be in 1..{max_tokens} (max_tokens), got {buffer_tokens}; correct it")
        self._free_tokens = max_tokens - buffer_tokens
        self._buffer_tokens = buffer_tokens

    def __call__(self, prompt: Prompt, rollout: Rollout) -> float:
        """Return the punishment of one rollout, -1.0 to 0.0, from its number of sampled tokens.

        Raises `ValueError` if the number of tokens is not known.
        """
        if rollout.num_tokens is None:
            raise ValueError(
                "the tokens of the response were not counted, because only its text is given; leave this reward out"
            )
        return max(-1.0, min(0.0, (self._free_tokens - rollout.num_tokens) / self._buffer_tokens))


@REWARDS.register("environment")
def environment(prompt: Prompt, rollout: Rollout, *, failed: float = 0.0) -> Score:
    """Return the rewards that the environment gave to the rollout, including rewards of single turns.

    If the environment failed and ``environment.on_failure`` is ``score``, the reward is ``failed``. Raises `ValueError`
    if the environment returned no reward, or if no environment made the rollout.
    """
    del prompt
    outcome = rollout.outcome
    if outcome is None and rollout.failure:
        return Score(reward=failed)
    if outcome is None or (outcome.reward is None and not outcome.turn_rewards):
        raise ValueError("the environment returned no reward; set Outcome.reward, or use another reward")
    return Score(reward=outcome.reward or 0.0, turn_rewards=outcome.turn_rewards)


@REWARDS.register("format")
class Format:
    """Gives 1.0 if the whole response matches a regular expression, else 0.0. ``.`` also matches line breaks.

    Args:
        pattern: The expression; by default ``<think>…</think> <answer>…</answer>``.
    """

    def __init__(self, *, pattern: str = _TAGGED) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern must be a regular expression, got {pattern!r}: {error}; correct it") from error

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        """Return 1.0 if the whole response matches the regular expression, else 0.0."""
        return float(self._pattern.fullmatch(response_text) is not None)


@REWARDS.register("math_verify")
class MathVerify:
    """Gives 1.0 if the response's final expression is mathematically equal to the ground truth, else 0.0.

    Args:
        timeout_s: Limit in seconds to parse an expression, and to compare two expressions. If the comparison takes
            longer, the expressions are treated as different.
    """

    def __init__(self, *, timeout_s: int = 5) -> None:
        if find_spec("math_verify") is None:
            raise ValueError("the package math-verify must be installed, got none: pip install 'asyncrl[math]'")
        self._timeout_s = timeout_s

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        r"""Return 1.0 if the response's final expression equals the ground truth mathematically, else 0.0.

        A ground truth without ``$`` or ``\boxed`` is read as one expression in LaTeX or a number.

        Raises `ValueError` if the ground truth is not an expression.
        """
        from math_verify import parse, verify

        truth = str(prompt.ground_truth)
        if "$" not in truth and "\\boxed" not in truth:
            truth = f"\\boxed{{{truth}}}"
        gold = parse(truth, parsing_timeout=self._timeout_s)
        if not gold:
            raise ValueError(f"the ground truth must be an expression, got {prompt.ground_truth!r}")
        written = parse(response_text, parsing_timeout=self._timeout_s)
        return float(verify(gold, written, timeout_seconds=self._timeout_s))


@REWARDS.register("code")
class Code:
    """Runs tests on the response's last fenced code block, or on the whole response if there is no such block.

    The tests run in a sandbox. Tests are Python code with asserts, or pairs of standard input and expected standard
    output. Outputs are compared line by line without trailing spaces. Pairs are a list of ``{"stdin": …, "stdout": …}``
    or ``{"input": …, "output": …}``, or a mapping ``{"inputs": […], "outputs": […]}``. The tests may also be JSON text.

    Args:
        tests: Name of the extra column of the data that has the tests; by default, the ground truth has them.
        partial: Score the fraction of passed tests. Otherwise the score is 1.0 if all tests pass, else 0.0. All asserts
            together are one test.
        language: ``python`` or ``bash``.
        at_once: Number of programs that run at the same time in one scoring process.
        kind: How the sandbox isolates programs (`SandboxKind`).
        python: Interpreter of the programs.
        limits: Fields of `SandboxLimits`. Example: ``{cpu_time_s: 2.0}``.
    """

    def __init__(
        self,
        *,
        tests: str = "",
        partial: bool = False,
        language: str = "python",
        at_once: int = 4,
        kind: str = SandboxKind.auto,
        python: str = "",
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        if at_once < 1:
            raise ValueError(f"at_once must be >= 1, got {at_once}; leave it out for the default")
        self._tests = tests
        self._partial = partial
        self._language = language
        self._places = asyncio.Semaphore(at_once)
        self._sandbox = Sandbox(kind=kind, python=python, limits=SandboxLimits(**limits or {}))

    async def start(self) -> None:
        """Choose a kind of sandbox that works here. Raises `SandboxError` if this machine cannot isolate programs."""
        await self._sandbox.start()

    async def __call__(self, prompt: Prompt, response_text: str) -> float:
        """Run the tests of the prompt on the code in the response, and return the score, 0.0 to 1.0.

        Raises `ValueError` if the prompt's row of the data has no valid tests.
        """
        if self._tests and self._tests not in prompt.extra:
            raise ValueError(f"the row must have tests in column {self._tests!r}; name it in data.extra_keys")
        tests = _read_tests(prompt.extra[self._tests] if self._tests else prompt.ground_truth)
        code = code_of(response_text)
        passed = 0
        for number, test in enumerate(tests):
            async with self._places:
                passed += await (self._passes(code, *test) if isinstance(test, tuple) else self._holds(code, test))
            if passed <= number and not self._partial:
                return 0.0
        return passed / len(tests)

    async def _passes(self, code: str, given: str, expected: str) -> bool:
        result = await self._sandbox.run(code, stdin=given, language=self._language)
        return result.is_success and _lines(result.stdout) == _lines(expected)

    async def _holds(self, code: str, asserts: str) -> bool:
        """Return whether all asserts hold. They do not hold if the code ends its process before the last assert."""
        passed = secrets.token_hex(16)
        files = {"solution.py": code, "tests.py": asserts}
        result = await self._sandbox.run(_ASSERTING.format(passed=passed), files=files)
        return result.is_success and result.stdout.endswith(passed)


_ASSERTING = """\
def run():
    import os, sys
    stdout = os.dup(1)
    names = sys.modules["__main__"].__dict__  # pickle and typing find the classes of the program there
    sources = [(name, open(name).read()) for name in ("solution.py", "tests.py")]
    for name in ("main.py", "solution.py", "tests.py"):
        os.unlink(name)
    for name, source in sources:
        exec(compile(source, name, "exec"), names)
    sys.stdout.flush()
    os.write(stdout, b"{passed}")
run()
"""


def code_of(response_text: str) -> str:
    """Return the last fenced code block of a response, or the whole response if there is none."""
    code, place = response_text, 0
    # Do not use a regular expression, because its time would grow with the square of the line length.
    while (opening := response_text.find(_FENCE, place)) >= 0:
        first = response_text.find("\n", opening) + 1
        closing = response_text.find(_FENCE, first) if first else -1
        if closing < 0:
            break
        code, place = response_text[first:closing], closing + len(_FENCE)
    return code


def _read_tests(tests: Any) -> Sequence[tuple[str, str] | str]:
    """Return the tests as pairs of input and expected output, or as texts of asserts."""
    if isinstance(tests, str):
        try:
            parsed = json.loads(tests)
        except ValueError:
            parsed = None
        if not isinstance(parsed, (list, Mapping)):
            return [tests] if tests.strip() else _no_tests(tests)
        tests = parsed
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= set(tests):
        given, outs = tests["inputs"], tests["outputs"]
        if not (isinstance(given, list) and isinstance(outs, list) and len(given) == len(outs)):
            return _no_tests(tests)
        tests = [{"stdin": given, "stdout": out} for given, out in zip(given, outs, strict=True)]
    if not isinstance(tests, list) or not tests:
        return _no_tests(tests)
    if all(isinstance(test, str) for test in tests):
        return tests
    pairs = []
    for test in tests:
        given, out = (
            # parquet stores null for a missing field
            [test[name] for name in names if test.get(name) is not None] if isinstance(test, Mapping) else []
            for names in (("stdin", "input"), ("stdout", "output"))
        )
        if not given or not out:
            return _no_tests(tests)
        pairs.append((_text(given[0]), _text(out[0])))
    return pairs


def _no_tests(tests: Any) -> Sequence[str]:
    raise ValueError(
        f"the tests must be Python asserts or a list of {{stdin, stdout}}, got {str(tests)[:200]!r}; correct the row"
    )


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _final(text: str) -> str:
    _, boxed, rest = text.rpartition("\\boxed{")
    depth = 1
    for place, letter in enumerate(rest if boxed else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:place]
    return (re.findall(r"answer\s*:\s*(.*)", text, flags=re.IGNORECASE) or [""])[-1]


def _as_number(text: str) -> Decimal | None:
    """Read a number as a `Decimal`; None if ``text`` is not a number.

    As floats, two long integers would be equal if only their last digits differ.
    """
    try:
        number = Decimal(_plain(text))
    except InvalidOperation:
        return None
    return None if number.is_nan() else number


def _plain(text: str) -> str:
    return text.replace(",", "").replace("\N{MINUS SIGN}", "-")


def _quantities(text: str) -> list[float]:
    found = []
    for written in _QUANTITY.findall(text):
        numerator, _, denominator = _plain(written).partition("/")
        if not denominator:
            found.append(float(numerator))
        elif float(denominator):
            found.append(float(numerator) / float(denominator))
    return [number for number in found if math.isfinite(number)]
