"""Computes how much GPU memory a learner needs, and how often its host would wait for the GPU.

``python -m benchmarks.gpu_paper`` does not need a GPU. The memory and the waits come from an update on fake tensors at
full width (`benchmarks.full_size`). The update runs at two depths. The peak memory is extrapolated to the full depth,
because each layer adds the same number of bytes. Other figures count copies to the GPU (`benchmarks.gpu_publish`), or
compare times (`benchmarks.learner`). The last line of the output is JSON.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from asyncrl.cli.compose import CONFIG_DIR, compose_run
from asyncrl.planner.device_memory import GIB, ModelSize, RankSetup, rank_bytes
from asyncrl.planner.fit import CARDS, card_bytes, check_memory_of_devices, model_size
from benchmarks.full_size import MODELS, QUICKSTART, fake_update, peak_at_full_depth
from benchmarks.gpu_publish import h2d_bytes_per_published_byte, writes_per_expert_tensor
from benchmarks.learner import frozen_head_ratio
from benchmarks.report import Target, print_report
from learner.config import SELECTIVE, GradientSync, LearnerConfig

CASES = {
    "Qwen3-0.6B on 1": ("Qwen3-0.6B", LearnerConfig(num_ranks=1)),
    "Qwen2.5-7B on 8": ("Qwen2.5-7B", LearnerConfig(num_ranks=8)),
    "Qwen3-8B on 4": ("Qwen3-8B", LearnerConfig(num_ranks=4)),
    "Qwen3-8B on 4, selective": ("Qwen3-8B", LearnerConfig(num_ranks=4, activation_checkpointing=SELECTIVE)),
    "Qwen3-30B-A3B on 8": ("Qwen3-30B-A3B-Base", LearnerConfig(num_ranks=8)),
}
"""For each comparison with the planner's prediction, the model and the learner's options."""

TARGETS = {
    "h2d_bytes_per_published_byte": Target(at_most=1.05),
    "writes_per_expert_tensor": Target(at_most=0.15),
    "fake_8b_step_peak_gb_per_rank": Target(at_most=60),
    "planner_memory_error": Target(at_most=0.08),
    "host_syncs_in_micro_batch_loop": Target(at_most=0),
    "experiments_that_fit": Target(at_least=1),
    "frozen_head_backward_ratio": Target(at_most=0.65),
}


def planned_bytes(settings: dict[str, Any], learner: LearnerConfig) -> int:
    """Return the planner's prediction of a rank's peak bytes. ``settings`` is the model's ``config.json``."""
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**settings).save_pretrained(folder)
        size = ModelSize.of(folder)
    setup = RankSetup(
        num_shards=learner.num_ranks,
        tokens=learner.max_tokens_per_micro_batch,
        checkpointing=bool(learner.activation_checkpointing),
        keeps_attention=learner.activation_checkpointing == SELECTIVE,
        whole_gradients=learner.gradient_sync is GradientSync.update,
        chunk_tokens=learner.logprob_chunk_tokens,
    )
    return sum(rank_bytes(size, setup).values())


def waits_of_experiments() -> dict[str, int]:
    """Count how often the host would wait for the GPU in the loop over micro-batches. Return a number per experiment.

    The result has all experiments of ``configs/experiment`` except ``custom``. Each model is reduced to two layers.
    """
    found = {}
    for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml")):
        config = compose_run([f"experiment={path.stem}"])
        model = Path(config.model.path).name
        if path.stem != "custom":
            settings = {**MODELS.get(model, QUICKSTART), "num_hidden_layers": 2}
            found[path.stem] = len(fake_update(settings, config.learner, config.algorithm).waits)
    return found


def experiments_that_fit() -> dict[str, str]:
    """Check whether the built-in experiments fit on their GPUs. Return one text per experiment.

    The text says why the experiment does not fit. It is empty if the experiment fits. A comment in the experiment's
    file names the GPUs (``Hardware: ... GPUs of 80 GB``). The text is also empty if the file has no such comment.
    """
    reasons = {}
    for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml")):
        named = re.search(r"GPUs? of (\d+) GB", path.read_text())
        config = compose_run([f"experiment={path.stem}"])
        reasons[path.stem] = ""
        if named:
            smallest = min(size for size in map(card_bytes, CARDS) if size >= int(named[1]) * 0.93 * GIB)
            try:
                check_memory_of_devices(config, model_size(config.model.path), smallest)
            except ValueError as error:
                reasons[path.stem] = str(error)
    return reasons


def main() -> None:
    """Compute a learner's GPU memory, and how often its host waits for the GPU. Print a table, then figures as JSON."""
    torch.set_num_threads(1)
    rows: dict[str, str] = {}
    errors, peaks = [], {}
    for case, (name, options) in CASES.items():
        recomputed = options.activation_checkpointing or True
        learner = replace(options, activation_checkpointing=recomputed, gradient_sync=GradientSync.micro_batch)
        peaks[case], planned = peak_at_full_depth(MODELS[name], learner), planned_bytes(MODELS[name], learner)
        errors.append(abs(planned / peaks[case] - 1))
        rows[case] = f"{peaks[case] / 1e9:.1f} GB by the tracker, {planned / 1e9:.1f} GB by the planner"
    waits, fits = waits_of_experiments(), experiments_that_fit()
    rows |= {f"{name} does not fit": reason for name, reason in fits.items() if reason}
    rows["waits"] = ", ".join(f"{name} {count}" for name, count in waits.items())
    figures = {
        "h2d_bytes_per_published_byte": h2d_bytes_per_published_byte(),
        "writes_per_expert_tensor": writes_per_expert_tensor(),
        "fake_8b_step_peak_gb_per_rank": peaks["Qwen3-8B on 4"] / 1e9,
        "planner_memory_error": max(errors),
        "host_syncs_in_micro_batch_loop": float(sum(waits.values())),
        "experiments_that_fit": statistics.mean(not reason for reason in fits.values()),
        "frozen_head_backward_ratio": frozen_head_ratio(5),
    }
    title = "costs on a GPU; activation checkpointing, gradients reduced per micro-batch, 16,384 tokens per rank"
    print_report(title, rows, figures, TARGETS, baseline="torch's memory tracker, an output layer that is trained")


if __name__ == "__main__":
    main()
