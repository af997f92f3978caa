"""A log of a run's requests to SGLang, and of the sampled tokens in SGLang's answers.

`LOGGING` is a ``sitecustomize`` module. Pass its folder as ``python_path`` of a `RunningTraining`. Then each rollout
worker appends one line per chunk of an answer to ``engine.jsonl`` in the module's folder.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LOGGING = """
import sys

if any("default_worker" in word for word in sys.orig_argv):  # a process of Ray
    import json, os
    from pathlib import Path
    from rollout_fleet.engines.sglang import StreamedSample

    file = os.open(Path(__file__).with_name("engine.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    inner = StreamedSample.add

    def add(self, chunk):
        meta = chunk["meta_info"]
        line = {
            "id": self.request.id, "pid": os.getpid(), "prompt_ids": self.request.prompt_ids.tolist(),
            "num_tokens": meta["completion_tokens"], "triples": meta.get("output_token_logprobs") or [],
            "spans": meta.get("weight_versions") or [], "finish_reason": (meta["finish_reason"] or {}).get("type"),
        }
        os.write(file, json.dumps(line).encode() + b"\\n")
        return inner(self, chunk)

    StreamedSample.add = add
"""


@dataclass(kw_only=True)
class EngineAnswer:
    """SGLang's answer to one request.

    Attributes:
        id: Id of the request: group, attempt, sample, turn, and number of the request within the turn.
        pid: Process id of the rollout worker.
        prompt_ids: The prompt's tokens. ``token_ids``, ``logprobs`` and ``versions`` describe the sampled tokens.
            The versions come with the last chunk.
        finish_reason: None if the server or the worker died during the answer.
    """

    id: str
    pid: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str | None

    @property
    def names(self) -> tuple[int, int, int, int, int]:
        """The parts of the request's id: group, attempt, sample, turn, and number of the request in the turn."""
        group, attempt, sample, turn, number = map(int, self.id.split("-"))
        return group, attempt, sample, turn, number

    @property
    def path(self) -> list[int]:
        """The tokens of the prompt and of the answer."""
        return self.prompt_ids + self.token_ids

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason in ("stop", "length")


def read_engine_log(folder: Path) -> list[EngineAnswer]:
    """Return the answers to all requests, in the order of the first chunk of each answer."""
    answers: dict[tuple[int, str], EngineAnswer] = {}
    for line in (folder / "engine.jsonl").read_text().splitlines():
        chunk = json.loads(line)
        if chunk["id"].startswith("warm-up"):
            continue
        nothing: Any = {"token_ids": [], "logprobs": [], "versions": [], "finish_reason": None}
        known = {name: chunk[name] for name in ("id", "pid", "prompt_ids")}
        answer = answers.setdefault((chunk["pid"], chunk["id"]), EngineAnswer(**known, **nothing))
        num_new = chunk["num_tokens"] - len(answer.token_ids)
        for logprob, token, _ in chunk["triples"][len(chunk["triples"]) - num_new :]:
            answer.token_ids.append(token)
            answer.logprobs.append(logprob)
        answer.finish_reason = chunk["finish_reason"]
        if answer.finish_reason is not None:
            answer.versions = [int(s["version"]) for s in chunk["spans"] for _ in range(s["start"], s["end"])]
    return list(answers.values())


def assert_trained_tokens_were_sampled(rows: Iterable[dict[str, Any]], answers: Sequence[EngineAnswer]) -> int:
    """Compare each trained token of ``rows`` with SGLang's answers. Returns the number of trained tokens.

    SGLang must have sampled the token after the same tokens, with the same log-prob and version. The tokens before a
    sampled part must be the prompt of a request.
    """
    by_prompt: dict[bytes, list[EngineAnswer]] = defaultdict(list)
    for answer in answers:
        by_prompt[_key(answer.prompt_ids)].append(answer)
    num_checked = 0
    for row in rows:
        begin = len(row["prompt_ids"])
        ids = [*row["prompt_ids"], *row["response_ids"]]
        logprobs, versions = ([None] * begin + row[name] for name in ("behavior_logprobs", "versions"))
        for first, last in _stretches([False] * begin + row["response_mask"]):
            assert _is_sampled(by_prompt, ids, logprobs, versions, first, last), (
                f"group {row['group_id']}, attempt {row['attempt']}: tokens {ids[first:last]} at {first} of versions "
                f"{versions[first:last]} were not sampled after {ids[:first]}; sampled there: "
                f"{[(a.id, a.token_ids, a.versions) for a in by_prompt[_key(ids[:first])]]}"
            )
            num_checked += last - first
    return num_checked


def _is_sampled(by_prompt: Any, ids: list[int], logprobs: list, versions: list, first: int, last: int) -> bool:
    """Return whether the tokens from ``first`` to ``last`` are one answer of SGLang, or several successive answers.

    In the second case, the prompt of each request after the first ends with the answer to the request before it.
    """
    if first == last:
        return True
    for answer in by_prompt.get(_key(ids[:first]), ()):
        end = first + len(answer.token_ids)
        # If SGLang did not finish an answer, the next prompt possibly contains only the first tokens of the answer.
        ends = [end] if answer.is_finished else range(end, first, -1)
        for place in ends:
            num = place - first
            if (
                num
                and place <= last
                and ids[first:place] == answer.token_ids[:num]
                and np.allclose(logprobs[first:place], answer.logprobs[:num], atol=1e-6)
                and (not answer.versions or versions[first:place] == answer.versions[:num])
                and _is_sampled(by_prompt, ids, logprobs, versions, place, last)
            ):
                return True
    return False


def _stretches(mask: list[bool]) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _key(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()
