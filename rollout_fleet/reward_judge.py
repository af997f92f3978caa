"""A reward from a language model that grades responses.

Any server with OpenAI's chat completions can serve the model.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from asyncrl.core.types import Prompt

from .reward_protocol import REWARDS

_TEMPLATE = """\
Grade the answer to the question. Compare it with the reference, if there is one.

<question>
{question}
</question>
<reference>
{ground_truth}
</reference>
<answer>
{response}
</answer>

Think briefly. End with one line "Score: N", where N is a number from {low:g} (wrong) to {high:g} (right)."""
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LONGEST_PAUSE_S = 30.0
_SHOWN_CHARACTERS = 200
URL_VARIABLE, KEY_VARIABLE = "ASYNCRL_JUDGE_URL", "ASYNCRL_JUDGE_KEY"
"""Environment variables in which scoring processes find the server of ``rollout_fleet.judge_model``."""


@REWARDS.register("judge")
class Judge:
    """Asks a model to score each response, and scales the score to 0.0 to 1.0.

    The requests for all responses to a prompt are sent in parallel.

    Args:
        url: Base URL of the server. Example: ``https://api.openai.com/v1``. Empty: the server of
            ``rollout_fleet.judge_model``.
        model: Name of the model on the server.
        template: Text of the request, with the fields ``{question}``, ``{response}``, ``{ground_truth}``, ``{low}``,
            ``{high}`` and ``{extra[COLUMN]}``.
        api_key: Environment variable that holds the key; ``rollout_fleet.pass_secrets`` must name it. Empty: no key.
        low: Lowest score that the template allows. It becomes 0.0.
        high: Highest score that the template allows. It becomes 1.0.
        pattern: Regular expression for the model's answer. The first group of its last match is the score.
        options: Further fields of the request. Example: ``{temperature: 0.0}``.
        retries: Number of times that a failed request is sent again. An answer without a score is a failure too.
        timeout_s: Deadline of one request. ``rollout_fleet.reward_timeout_s`` bounds all requests of a prompt.
        at_once: Number of requests at once per scoring process.
    """

    def __init__(
        self,
        *,
        url: str = "",
        model: str = "judge",
        template: str = _TEMPLATE,
        api_key: str = "",
        low: float = 0.0,
        high: float = 10.0,
        pattern: str = r"Score:\s*\**\s*(-?\d+(?:\.\d+)?)",
        options: Mapping[str, Any] | None = None,
        retries: int = 4,
        timeout_s: float = 60.0,
        at_once: int = 16,
    ) -> None:
        if not low < high:
            raise ValueError(f"low must be below high, got {low} and {high}; the defaults are 0 and 10")
        if url and (not url.startswith(("http://", "https://")) or not urlsplit(url).netloc):
            raise ValueError(f"url must begin with http:// or https:// and a host, got {url!r}; correct it")
        if not (retries >= 0 and timeout_s > 0 and at_once >= 1):
            raise ValueError(
                f"retries must be >= 0, timeout_s > 0 and at_once >= 1, got {retries}, {timeout_s} and {at_once}; "
                "leave them out for the defaults"
            )
        try:
            num_groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"pattern must be a regular expression, got {pattern!r}: {error}; correct it") from error
        if num_groups < 1:
            raise ValueError(
                f"pattern must have a capture group for the score, got {pattern!r}; example: Score: (\\d+)"
            )
        self._base = url or os.environ.get(URL_VARIABLE, "")
        self._url = self._base.rstrip("/") + "/chat/completions"
        self._model = model
        self._template = template
        self._key_name = api_key if url else KEY_VARIABLE
        self._low, self._high = low, high
        self._pattern = re.compile(pattern)
        self._options = dict(options or {})
        self._retries = retries
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._places = asyncio.Semaphore(at_once)
        # Fill the template once now, so that a wrong field raises `ValueError` here.
        self._fill(question="", response="", ground_truth="", extra=defaultdict(str))

    async def __call__(self, prompt: Prompt, response_text: str) -> float:
        """Let the model grade one response, and return its score, scaled to 0.0 to 1.0.

        Raises `ConnectionError` or `ValueError` if the model gives no score after all retries.
        """
        if not self._base:
            raise ValueError(
                "the judge must have a server, got none: rollout_fleet.judge_model is served only during a run; set "
                "rollout_fleet.reward_options.judge.url"
            )
        question = "\n\n".join(f"{one.get('role')}: {one.get('content')}" for one in prompt.messages)
        if not question and "{question}" in self._template:
            question = prompt.extra.get("question") or prompt.extra.get("prompt")
            if question is None:
                raise ValueError(
                    "the judge's template has {question}, but a prompt of plain text has no question; name its column "
                    "(question or prompt) in data.extra_keys, or use {extra[COLUMN]}"
                )
        headers = {}
        if self._key_name:
            if self._key_name not in os.environ:
                raise ValueError(f"the judge's key must be in the variable {self._key_name}, got none")
            headers["Authorization"] = f"Bearer {os.environ[self._key_name]}"
        request = self._fill(
            question=question, response=response_text, ground_truth=prompt.ground_truth, extra=prompt.extra
        )
        async with (
            self._places,
            aiohttp.ClientSession(headers=headers, timeout=self._timeout, trust_env=True) as session,
        ):
            return await self._judge(session, request)

    def _fill(self, **fields: Any) -> str:
        try:
            return self._template.format(**fields, low=self._low, high=self._high)
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(
                "template may have the fields question, response, ground_truth, low, high and extra[COLUMN], got "
                f"{error!r}; name the column in data.extra_keys, and write {{{{ and }}}} for braces"
            ) from error

    async def _judge(self, session: aiohttp.ClientSession, request: str) -> float:
        body = {"model": self._model, "messages": [{"role": "user", "content": request}], **self._options}
        failure: Exception = ValueError("no request was made")
        for attempt in range(self._retries + 1):
            pause_s = min(2.0**attempt, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            try:
                async with session.post(self._url, json=body) as answer:
                    text = await answer.text(errors="replace")
                    if answer.status == 200:
                        return self._score(text)
                    failure = ConnectionError(f"the judge at {self._url} answered {answer.status}: {_short(text)}")
                    if answer.status not in _RETRIED:
                        break
                    asked_s = answer.headers.get("Retry-After", "")
                    pause_s = min(float(asked_s), _LONGEST_PAUSE_S) if asked_s.isdecimal() else pause_s
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = f"{type(error).__name__}: {error}"
                failure = ConnectionError(f"the judge at {self._url} gave no answer: {_short(reason)}")
            except ValueError as error:
                failure, pause_s = error, 0.0
            if attempt < self._retries:
                await asyncio.sleep(pause_s)
        raise failure

    def _score(self, answer: str) -> float:
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"] or ""
        except ValueError:
            raise ValueError(f"the judge at {self._url} must answer in JSON, got {_short(answer)!r}") from None
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the judge's answer has no message: {_short(answer)}") from None
        if not isinstance(text, str):
            raise ValueError(f"the judge's message must be a text, got {_short(str(text))}")
        found = [*self._pattern.finditer(text)]
        try:
            score = float(found[-1][1])
        except (IndexError, TypeError, ValueError):  # no match, or the matched text is not a number
            score = math.nan
        if not self._low <= score <= self._high:
            shown = _short(text[-_SHOWN_CHARACTERS:])
            raise ValueError(f"the judge must give a score from {self._low:g} to {self._high:g}, got {shown!r}")
        return (score - self._low) / (self._high - self._low)


def _short(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARACTERS]
