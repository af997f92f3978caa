"""Recomputes the log-probs of tokens that a run has stored, each with the policy version that sampled the token."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.core.image_files import is_vision_model
from asyncrl.core.trajectory import UNVERSIONED
from asyncrl.metrics import read_options
from asyncrl.run.audit import Audit, BadReceipt
from asyncrl.run.run_lives import Life
from asyncrl.samples import read_samples

LARGEST_GAP = 0.05
"""Largest accepted mean absolute difference between the stored and the recomputed log-probs of a sample, in nats.

The engine used other batches than this audit, and perhaps bfloat16, so a small difference is normal.
"""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StoredSample:
    """A sample of `learner.trajectory_log`.

    ``life`` is the ``asyncrl train`` process that trained on the sample. ``step`` is the number of the learner step.
    """

    life: Life
    step: int
    row: Row

    @property
    def versions(self) -> set[int]:
        """The policy versions under which the tokens of the sample were generated."""
        return {*self.row["versions"]} - {UNVERSIONED}


def check_forward(result: Audit, lives: Sequence[Life], count: int) -> None:
    """Recompute the log-probs of up to ``count`` stored samples, and add the comparison to ``result``.

    ``lives`` are the processes of the run, which stored the samples. A sample is left out if the weights of one of its
    versions no longer exist. Weights exist in checkpoints, in ``snapshots/`` and in the folder of the initial policy.
    """
    stored = {version: place for life in lives for version, place in _weights(life)}
    models = [*stored.values(), *(read_options(life.folder, "model.path")["model"]["path"] for life in lives)]
    if any(is_vision_model(str(model)) for model in models):
        result.unchecked.append(f"log-probs of {count} samples: the model uses images, and images are not stored")
        return
    chosen: list[StoredSample] = []
    gone: Counter[int] = Counter()
    for sample in _samples(lives):
        if len(chosen) == count:
            break
        if sample.versions <= stored.keys():
            chosen.append(sample)
        gone.update(sample.versions - stored.keys())
    gaps = _gaps(chosen, stored)
    for sample, gap in zip(chosen, gaps, strict=True):
        if not gap <= LARGEST_GAP:
            fault = BadReceipt(
                life=sample.life.folder,
                step=sample.step,
                group=sample.row["group_id"],
                what=f"the mean distance of a sample's log-probs to those of versions {sorted(sample.versions)}",
                expected=f"at most {LARGEST_GAP}",
                found=f"{gap:.3f}",
                remedy="the engine sampled with other weights or other sampling options than it reported",
            )
            result.bad.append(fault)
    if gaps:
        result.checked.append(
            f"log-probs of {len(gaps)} samples under their versions: mean distance up to {max(gaps):.2g}"
        )
    if len(gaps) < count:
        named = ", ".join(f"{version} (in {number} samples)" for version, number in sorted(gone.items()))
        why = f"the weights of these versions are gone: {named}" if gone else "record_trajectories=true stores more"
        result.unchecked.append(f"log-probs of {count - len(gaps)} of {count} samples: {why}")


def _gaps(samples: Sequence[StoredSample], stored: Mapping[int, Path]) -> list[float]:
    """Return for each sample the mean absolute difference between stored and recomputed log-probs, in nats."""
    logprobs = [np.zeros(len(sample.row["versions"]), dtype=np.float32) for sample in samples]
    for version in sorted({version for sample in samples for version in sample.versions}):
        with _model(stored[version]) as model:
            for sample, own in zip(samples, logprobs, strict=True):
                if version in sample.versions:
                    is_own = np.array(sample.row["versions"]) == version
                    options = read_options(sample.life.folder, "rollout_fleet.sampling.temperature")
                    temperature = options["rollout_fleet"]["sampling"]["temperature"]
                    own[is_own] = _logprobs(model, sample.row, temperature)[is_own]
    return [
        float(np.abs(own - sample.row["behavior_logprobs"])[np.array(sample.row["versions"]) != UNVERSIONED].mean())
        for sample, own in zip(samples, logprobs, strict=True)
    ]


def _weights(life: Life) -> Iterator[tuple[int, Path]]:
    initial = Path(life.record.policy)
    if life.record.policy and (initial / "config.json").is_file():
        yield 0, initial
    for folder in sorted((life.folder / "snapshots").glob("v*")):
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            yield int(folder.name[1:]), folder
    for checkpoint in life.checkpoints:
        yield checkpoint.version, checkpoint.path


def _samples(lives: Sequence[Life]) -> Iterator[StoredSample]:
    for life in lives:
        for part in ("trajectories", "tokens"):
            files = sorted((life.folder / part).glob("step_*.parquet"))
            for file in files:
                for row in read_samples([file]):
                    yield StoredSample(life=life, step=int(file.name.split("_")[1]), row=row)
            if files:
                break


@contextmanager
def _model(place: Path) -> Iterator[Any]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from learner.checkpoint import export

    logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as folder:
        source = place
        if not (place / "config.json").is_file():
            source = Path(folder, "model")
            export(place, source)
        yield AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


def _logprobs(model: Any, row: Row, temperature: float) -> np.ndarray:
    """Return the log-prob of each response token of a sample, [R] float32."""
    import torch

    num_prompt = len(row["prompt_ids"])
    token_ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]], dtype=torch.int64)
    with torch.no_grad():
        logits = model(token_ids).logits[0, :-1].float() / temperature
    own = logits.log_softmax(-1).gather(1, token_ids[0, 1:, None])[:, 0]
    return np.concatenate([np.zeros(1, dtype=np.float32), own.numpy()])[num_prompt:]
