"""Saves samples as parquet files in the run's ``samples/``, so that people can read them.

In training, each rollout worker saves the first ``num_groups`` groups that finish in every interval of ``every_steps``
policy versions (`SamplesConfig`). In evaluations, all answers are saved.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.core.trajectory import Turn
from asyncrl.core.types import Prompt

from .config import SamplesConfig
from .engines.engine import Decode, SampleOutput
from .episodes.episode_run import EpisodeRun
from .rewards import Scores

logger = logging.getLogger(__name__)


class SampleKind(StrEnum):
    """Source of samples: training, or the sampled or greedy answers of an evaluation."""

    train = "train"
    sampled = "sampled"
    greedy = "greedy"


class SampleLog:
    """Writes files ``KIND-vVERSION-rolloutRANK.parquet`` with one row per sample.

    KIND is a `SampleKind`. Files of an evaluation have ``-NUMBER`` before ``.parquet``. NUMBER counts the calls of
    `keep_answers`, from 00001. If a file cannot be written, a warning is logged.
    """

    def __init__(self, directory: Path, *, rank: int, config: SamplesConfig, decode: Decode) -> None:
        self._directory = directory
        self._rank = rank
        self._config = config
        self._decode = decode
        self._next_version = 0
        self._rows: list[dict[str, Any]] = []
        self._num_groups = 0
        self._num_parts = 0

    async def start(self) -> None:
        """Import pyarrow now. The import takes one second, which would delay samples later."""
        await asyncio.to_thread(importlib.import_module, "pyarrow.parquet")

    async def add(
        self,
        prompt: Prompt,
        samples: Sequence[SampleOutput | Turn],
        texts: Sequence[str],
        scores: Scores,
        *,
        runs: Sequence[EpisodeRun] = (),
    ) -> None:
        """Save the samples of a finished training prompt, if this interval of policy versions needs more samples.

        The file is written when ``num_groups`` prompts of the interval have been added. ``texts`` are the decoded
        samples. ``runs`` has one run per sample if the samples are episodes; it is empty for single answers.
        """
        version = max(int(sample.versions[-1]) for sample in samples)
        if not self._config.every_steps or version < self._next_version:
            return
        rows = self.rows(prompt, samples, texts, scores)
        for place, run in enumerate(runs):
            rewards = scores.turn_rewards[place] if scores.turn_rewards else {}
            rows[place]["episode"] = json.dumps(run.described(self._decode, rewards), ensure_ascii=False)
        self._rows += rows
        self._num_groups += 1
        if self._num_groups >= self._config.num_groups:
            rows, self._rows, self._num_groups = self._rows, [], 0
            self._next_version = (version // self._config.every_steps + 1) * self._config.every_steps
            await self._write(SampleKind.train, version, rows)

    async def keep_answers(self, version: int, rows: Sequence[Mapping[str, Any]], *, per_prompt: int) -> None:
        """Write the sampled and the greedy answers of an evaluation to separate files.

        ``version`` is the policy version of the answers. ``rows`` has ``per_prompt`` rows per prompt, which the method
        `rows` makes. The last row of each prompt is the greedy answer.
        """
        self._num_parts += 1
        part, last = f"-{self._num_parts:05d}", per_prompt - 1
        for kind in (SampleKind.sampled, SampleKind.greedy):
            own = [row for place, row in enumerate(rows) if (place % per_prompt == last) == (kind is SampleKind.greedy)]
            if own:
                await self._write(kind, version, own, part=part)

    def rows(
        self, prompt: Prompt, samples: Sequence[SampleOutput | Turn], texts: Sequence[str], scores: Scores
    ) -> list[dict[str, Any]]:
        """Return one dict per sample of a prompt, with the columns of the parquet files.

        ``texts`` are the decoded samples. The column ``episode`` is an empty text; `add` fills it for episodes.
        """
        truth = prompt.ground_truth
        known = {
            "group_id": prompt.group_id,
            "data_source": prompt.data_source,
            "prompt": self._decode(prompt.prompt_ids.tolist()),
            "ground_truth": truth if isinstance(truth, str) else json.dumps(truth, default=repr, ensure_ascii=False),
        }
        return [
            known
            | {
                "response": text,
                "reward": float(scores.sums[index]),
                "rewards": json.dumps({name: float(part[index]) for name, part in scores.parts.items()}),
                "num_tokens": len(sample.token_ids),
                "finish_reason": str(sample.finish_reason or ""),
                "oldest_version": int(np.min(sample.versions, initial=np.iinfo(np.int32).max)),
                "newest_version": int(np.max(sample.versions, initial=-1)),
                "episode": "",
            }
            for index, (sample, text) in enumerate(zip(samples, texts, strict=True))
        ]

    async def _write(
        self, kind: SampleKind, version: int, rows: Sequence[Mapping[str, Any]], *, part: str = ""
    ) -> None:
        path = self._directory / f"{kind}-v{version:08d}-rollout{self._rank}{part}.parquet"

        def write() -> None:
            import pyarrow as pa
            import pyarrow.parquet as pq

            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            # a file needs valid Unicode, so `?` replaces unpaired surrogates
            valid = [
                {
                    name: value.encode(errors="replace").decode() if isinstance(value, str) else value
                    for name, value in row.items()
                }
                for row in rows
            ]
            pq.write_table(
                pa.Table.from_pylist([{"kind": str(kind), "version": version, **row} for row in valid]), partial
            )
            partial.rename(path)

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            logger.warning("samples are not saved: %s", error)
