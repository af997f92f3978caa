"""``python -m asyncrl.sft``: supervised fine-tuning with the learner's own trainer, packing and optimizer.

One process, or one a rank under ``torchrun --nproc-per-node N -m asyncrl.sft …``. Held-out prompts are answered
greedily by the in-process engine of rank 0, and training stops at ``sft.target_accuracy``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asyncrl.compose import compose_run
from asyncrl.config import RunConfig, check_files
from asyncrl.data.prompts import load_eval_prompts
from asyncrl.data.rows import read_rows
from asyncrl.prepare import warm_start_path, with_quickstart_assets
from asyncrl.protocol.types import Prompt
from learner.config import LearnerConfig, Schedule
from learner.losses import negative_log_likelihood
from learner.mesh import LearnerMesh
from learner.trainer import PolicyTrainer
from learner.types import TokenSequence
from learner.weights import SnapshotWriter, copy_tokenizer, gather_weights, write_model
from rollout_fleet.config import EngineKind
from rollout_fleet.decoding import load_decoder
from rollout_fleet.engines.factory import make_engine
from rollout_fleet.evaluation import evaluate_prompts
from rollout_fleet.rewards.scorer import RewardScorer
from rollout_fleet.types import EvaluationResult

logger = logging.getLogger(__name__)


def main(overrides: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="sft: %(message)s", stream=sys.stdout)
    logging.getLogger().setLevel(logging.WARNING)
    logger.setLevel(logging.INFO)
    try:
        config = with_quickstart_assets(compose_run(sys.argv[1:] if overrides is None else overrides))
        check_files(config)
        asyncio.run(fine_tune(config))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


async def fine_tune(config: RunConfig) -> Path:
    """Fine-tune ``model.path`` on ``sft.train_files``; returns the directory of the policy.

    Raises:
        ValueError: an option or a file is wrong, by name.
    """
    sft, began_s = config.sft, time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    sequences = read_demonstrations(config, tokenizer)
    held_out = load_eval_prompts(config.data, tokenizer)[: sft.eval_prompts]
    trainer = PolicyTrainer(
        _learner_config(config), model_path=config.model.path, total_updates=sft.max_steps, seed=config.seed
    )
    batches = _batches(sequences, sft.batch_size, config.seed, trainer.mesh)
    accuracy, step = None, 0
    async with _Examiner(config, held_out) as examiner:
        for step in range(1, sft.max_steps + 1):
            metrics = trainer.update(next(batches), negative_log_likelihood)
            if step % sft.eval_every == 0 or step == sft.max_steps:
                accuracy = await examiner.accuracy(trainer, step)
                logger.info(
                    "step %d  loss %.3f  greedy %.3f  %.1f s",
                    step,
                    metrics["loss"],
                    accuracy,
                    time.monotonic() - began_s,
                )
                if accuracy >= sft.target_accuracy:
                    break
    policy = warm_start_path(config)
    if (weights := gather_weights(trainer)) is not None:
        write_model(policy, trainer.pretrained, weights, trainer.compute_dtype)
        copy_tokenizer(config.model.path, policy)
        (policy / "sft.json").write_text(json.dumps({"steps": step, "accuracy": accuracy}) + "\n")
    logger.info("%d steps, greedy %.3f, %.1f s: %s", step, accuracy, time.monotonic() - began_s, policy)
    return policy


def read_demonstrations(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[TokenSequence]:
    """Read prompts and responses as sequences; the loss is on the response and its end-of-sequence token.

    Raises:
        ValueError: no file, or a file, row or column that is not as the options say.
    """
    sft = config.sft
    if not sft.train_files:
        raise ValueError("sft.train_files must name at least one parquet or jsonl file, got none")
    sequences = []
    for name in sft.train_files:
        rows = read_rows(name, [sft.prompt_key, sft.response_key])
        prompts = tokenizer(rows.column(sft.prompt_key), add_special_tokens=True)["input_ids"]
        responses = tokenizer(rows.column(sft.response_key), add_special_tokens=False)["input_ids"]
        for prompt, response in zip(prompts, responses, strict=True):
            ids = np.asarray([*prompt, *response, tokenizer.eos_token_id], dtype=np.int32)
            sequences.append(TokenSequence(input_ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt)))
    return sequences


def _learner_config(config: RunConfig) -> LearnerConfig:
    """The learner's options with the warm start's optimizer, on the ranks that this process group has."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sft = config.sft
    optimizer = replace(
        config.learner.optimizer,
        lr=sft.lr,
        weight_decay=sft.weight_decay,
        warmup_steps=sft.warmup_steps,
        schedule=Schedule.linear,
        min_lr_ratio=0.0,
    )
    sp_size = config.learner.sp_size if num_ranks > 1 else 1
    return replace(config.learner, num_ranks=num_ranks, sp_size=sp_size, optimizer=optimizer)


def _batches(
    sequences: Sequence[TokenSequence], size: int, seed: int, mesh: LearnerMesh
) -> Iterator[list[TokenSequence]]:
    """Endless batches in a seeded order, reshuffled every epoch; each rank gets its share of every batch."""
    generator = np.random.default_rng(seed)
    dp_size = mesh.num_ranks // mesh.sp_size
    order: list[int] = []
    while True:
        while len(order) < size:
            order += generator.permutation(len(sequences)).tolist()
        batch, order = order[:size], order[size:]
        yield [sequences[index] for index in batch[mesh.dp_rank :: dp_size]]


class _Examiner:
    """Answers held-out prompts greedily with the weights of the moment; on rank 0, the other ranks hear the result."""

    def __init__(self, config: RunConfig, held_out: Sequence[Prompt]) -> None:
        self._config = replace(config.rollout_fleet, engine=EngineKind.transformers)
        self._model_path = config.model.path
        self._held_out = held_out
        self._is_first = int(os.environ.get("RANK", "0")) == 0
        self._directory = tempfile.TemporaryDirectory(prefix="asyncrl-sft-")
        self._writer = SnapshotWriter(self._directory.name, keep=2)
        self._engine = make_engine(self._config, model_path=self._model_path, rank=0, log_dir="", seed=config.seed)
        self._scorer = RewardScorer(self._config.reward, num_processes=1, timeout_s=self._config.reward_timeout_s)
        self._decode = load_decoder(self._model_path)

    async def __aenter__(self) -> _Examiner:
        if self._is_first:
            await self._engine.start()
            await self._scorer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.stop()
        await self._scorer.close()
        self._directory.cleanup()

    async def accuracy(self, trainer: PolicyTrainer, step: int) -> float:
        """Mean greedy reward over the held-out prompts, on every rank; a collective."""
        snapshot = self._writer.write(step, trainer)
        result = [0.0]
        if self._is_first:
            await self._engine.load_weights(snapshot)
            rewards = (await self._answers()).rewards
            result = [sum(rewards) / len(rewards)]
        if trainer.mesh.num_ranks > 1:
            dist.broadcast_object_list(result, src=0)
        return result[0]

    async def _answers(self) -> EvaluationResult:
        return await evaluate_prompts(
            self._held_out,
            engine=self._engine,
            scorer=self._scorer,
            decode=self._decode,
            sampling=replace(self._config.sampling, temperature=0.0),
            num_samples=1,
        )


if __name__ == "__main__":
    sys.exit(main())
