"""Supervised fine-tuning: updates, evaluations and early stopping.

The options are in `asyncrl.config.WarmStartConfig`.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from asyncrl.config import (
    RunConfig,
    StopMetric,
    WarmStartConfig,
    episode_context,
    has_environment,
    num_positions,
    why_positions_end,
)
from asyncrl.core.errors import RewardError
from asyncrl.core.host import visible_gpus
from asyncrl.core.types import Prompt
from asyncrl.data.demonstrations import Demonstration, DemonstrationFormat, load_demonstrations
from asyncrl.data.prompts import load_eval_prompts
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.sft.warm_start import finished_warm_start, warm_start_path, write_warm_start
from asyncrl.single_controller.serialization import gather_values
from asyncrl.weights.publish import WeightPublisher
from learner.config import Device, LearnerConfig, LoraConfig, Schedule
from learner.fsdp import LearnerMesh
from learner.losses import Objective, negative_log_likelihood
from learner.model_folder import save_policy
from learner.model_shards import PretrainedShards
from learner.trainer import Trainer
from learner.types import TokenSequence
from rollout_fleet.answering import AnsweringParts
from rollout_fleet.config import EngineDevice, EngineKind
from rollout_fleet.evaluation import HeldOutAnswers

logger = logging.getLogger(__name__)

SUPERVISED = Objective(loss=negative_log_likelihood)


@dataclass(frozen=True, kw_only=True)
class SftEvaluation:
    """An evaluation of the policy during fine-tuning.

    Attributes:
        step: Number of updates before the evaluation.
        accuracy: Accuracy of greedy decoding on the held-out prompts; None without held-out prompts.
        val_loss: Validation loss in nats per token; None without validation data.
    """

    step: int
    accuracy: float | None = None
    val_loss: float | None = None

    def __str__(self) -> str:
        words = [f"validation loss {self.val_loss:.3f}"] if self.val_loss is not None else []
        words += [f"greedy {self.accuracy:.3f}"] if self.accuracy is not None else []
        return "  ".join(words) or "not measured"


async def fine_tune(config: RunConfig) -> Path:
    """Fine-tune ``model.path`` on ``sft.train_files``, or reuse an earlier result. Return the policy's directory.

    Raises:
        ValueError: an option or a file is wrong. The message names the option or the file.
    """
    began_s = time.monotonic()
    if (known := finished_warm_start(config)) is not None:
        logger.info("reusing %s, %s", warm_start_path(config), known)
        return warm_start_path(config)
    tokenizer: Any = load_tokenizer(config.model.path, chat_template=True)
    train, validation = read_demonstrations(config, tokenizer)
    held_out = _held_out_prompts(config, tokenizer)
    trainer = Trainer(
        _learner_config(config), model_path=config.model.path, total_updates=config.sft.max_steps, seed=config.seed
    )
    final = warm_start_path(config)
    kept = final.with_name(f".{final.name}-kept-{os.getpid()}")
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, kept, ignore_errors=True)
        evaluator = await stack.enter_async_context(GreedyAccuracy(config, held_out)) if held_out else None
        batches = _batches(train, config.sft.batch_size, config.seed, trainer.mesh)
        own = _share(validation, trainer.mesh)
        chosen = await _update(config.sft, trainer, batches, evaluator, own, kept=kept, began_s=began_s)
        if trainer.mesh.rank == 0:
            result = {"steps": chosen.step, "accuracy": chosen.accuracy, "val_loss": chosen.val_loss}
            write_warm_start(config, result, kept.rename)
    logger.info("%d steps, %s, %.1f s: %s", chosen.step, chosen, time.monotonic() - began_s, final)
    return final


async def _update(
    sft: WarmStartConfig,
    trainer: Trainer,
    batches: Iterator[list[TokenSequence]],
    evaluator: GreedyAccuracy | None,
    validation: Sequence[TokenSequence],
    *,
    kept: Path,
    began_s: float,
) -> SftEvaluation:
    """Update the policy until ``sft.max_steps`` or an early stop. Return the evaluation of the chosen policy.

    The chosen policy is the best policy if ``sft.patience`` is above 0, else the final policy. Rank 0 writes the chosen
    policy to the folder ``kept``. All ranks must call this function.
    """
    history: list[SftEvaluation] = []
    for step in range(1, sft.max_steps + 1):
        metrics = trainer.update(next(batches), SUPERVISED)
        if step % sft.eval_every and step != sft.max_steps:
            continue
        accuracy = await evaluator.accuracy(trainer, step) if evaluator else None
        val_loss = trainer.evaluate(validation, SUPERVISED)["loss"] if sft.validates else None
        history.append(SftEvaluation(step=step, accuracy=accuracy, val_loss=val_loss))
        if sft.patience and best_of(history, sft.stop_metric).step == step:
            save_policy(trainer, str(kept))
        logger.info("step %d  loss %.3f  %s  %.1f s", step, metrics["loss"], history[-1], time.monotonic() - began_s)
        if should_stop(history, sft):
            break
    if not sft.patience:
        save_policy(trainer, str(kept))
    return best_of(history, sft.stop_metric) if sft.patience else history[-1]


def best_of(history: Sequence[SftEvaluation], metric: StopMetric) -> SftEvaluation:
    """Return the evaluation with the best value of ``metric``. If several are equally good, return the first."""
    if metric is StopMetric.val_loss:
        losses = [math.inf if one.val_loss is None or math.isnan(one.val_loss) else one.val_loss for one in history]
        return history[losses.index(min(losses))]
    return max(history, key=lambda one: -1.0 if one.accuracy is None else one.accuracy)


def should_stop(history: Sequence[SftEvaluation], sft: WarmStartConfig) -> bool:
    """Return True if fine-tuning must end now. The last item of ``history`` is the newest evaluation.

    Fine-tuning ends if the newest evaluation reaches ``sft.target_accuracy`` or ``sft.target_val_loss``. It also ends
    if there were ``sft.patience`` evaluations after the best evaluation. A patience of 0 means no limit.
    """
    last = history[-1]
    if last.accuracy is not None and last.accuracy >= sft.target_accuracy:
        return True
    if last.val_loss is not None and last.val_loss <= sft.target_val_loss:
        return True
    since_best = len(history) - 1 - history.index(best_of(history, sft.stop_metric))
    return 0 < sft.patience <= since_best


def read_demonstrations(config: RunConfig, tokenizer: Any) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Read the demonstrations. Return a pair: the training sequences and the validation sequences.

    The loss includes only tokens of the assistant.

    Raises:
        ValueError: there is no file, or a file, row or column does not match the options.
    """
    sft = config.sft
    if not sft.train_files:
        raise ValueError("sft.train_files must name at least one parquet or jsonl file, got none")
    form = DemonstrationFormat(**{field.name: getattr(sft, field.name) for field in fields(DemonstrationFormat)})
    train, validation = (
        _sequences(load_demonstrations(files, form, tokenizer), config) for files in (sft.train_files, sft.val_files)
    )
    if sft.val_rows >= len(train):
        raise ValueError(
            f"sft.val_rows must be less than the {len(train)} rows of sft.train_files, got {sft.val_rows}; lower it"
        )
    if sft.val_rows:
        train, validation = train[: -sft.val_rows], train[-sft.val_rows :]
    return train, validation


def _sequences(demonstrations: Sequence[Demonstration], config: RunConfig) -> list[TokenSequence]:
    limit = num_positions(config)
    overlong = [one for one in demonstrations if len(one.token_ids) > limit]
    if overlong:
        raise ValueError(
            f"{overlong[0].where} has {len(overlong[0].token_ids)} tokens, expected at most the model's {limit} "
            f"positions{why_positions_end(config)} ({len(overlong)} of {len(demonstrations)} rows are longer); shorten "
            "or remove these rows"
        )
    return [TokenSequence(input_ids=one.token_ids, loss_mask=one.learned) for one in demonstrations]


def _held_out_prompts(config: RunConfig, tokenizer: Any) -> list[Prompt]:
    if not config.sft.eval_prompts:
        return []
    if not config.data.eval_files:
        raise ValueError(
            f"sft.eval_prompts={config.sft.eval_prompts} needs data.eval_files, got none; set data.eval_files, or "
            "sft.eval_prompts=0"
        )
    prompts = load_eval_prompts(config.data, tokenizer, has_environment=has_environment(config))
    return prompts[: config.sft.eval_prompts]


def _share(sequences: Sequence[TokenSequence], mesh: LearnerMesh) -> list[TokenSequence]:
    """Return the sequences for this rank. All ranks of a sequence-parallel group get the same sequences."""
    return list(sequences[mesh.dp_rank :: mesh.num_ranks // mesh.sp_size])


def _learner_config(config: RunConfig) -> LearnerConfig:
    """Return the learner's options for fine-tuning.

    The optimizer options come from ``sft``, and the number of ranks from ``WORLD_SIZE``. If the device is ``auto``, it
    becomes ``cuda`` if this node has a GPU for each of its ranks, else ``cpu``.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    num_here, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), visible_gpus()
    device = config.learner.device
    if device is Device.cuda and num_gpus < num_here:
        raise ValueError(
            f"learner.device=cuda needs a GPU for each of the {num_here} ranks on this node, got {num_gpus} visible; "
            "start fewer ranks, or set learner.device=cpu"
        )
    if device is Device.auto:
        device = Device.cuda if num_gpus >= num_here else Device.cpu
        if 0 < num_gpus < num_here:
            logger.warning("learner.device: auto is cpu, because %d ranks see %d GPUs", num_here, num_gpus)
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
    # The warm start (fine-tuning before RL) trains all weights, even if the RL run trains only adapters.
    own = {"num_ranks": num_ranks, "sp_size": sp_size, "device": device, "optimizer": optimizer, "lora": LoraConfig()}
    return replace(config.learner, **own)


def _batches(
    sequences: Sequence[TokenSequence], size: int, seed: int, mesh: LearnerMesh
) -> Iterator[list[TokenSequence]]:
    """Yield the sequences of this rank for each batch. The generator never ends.

    Each pass over ``sequences`` has a new order, which ``seed`` determines.
    """
    generator = np.random.default_rng(seed)
    order: list[int] = []
    while True:
        while len(order) < size:
            order += generator.permutation(len(sequences)).tolist()
        batch, order = order[:size], order[size:]
        yield _share([sequences[index] for index in batch], mesh)


class GreedyAccuracy:
    """Measures the accuracy of the current weights with greedy decoding.

    Rank 0 generates and scores the answers. All ranks get the result.
    """

    def __init__(self, config: RunConfig, held_out: Sequence[Prompt]) -> None:
        device = EngineDevice(_learner_config(config).device.value)  # the engine runs on the device of rank 0
        fleet = replace(config.rollout_fleet, engine=EngineKind.transformers, device=device, reward_processes=1)
        self._held_out = held_out
        self._is_first = int(os.environ.get("RANK", "0")) == 0
        self._directory = tempfile.TemporaryDirectory(prefix="asyncrl-sft-")
        self._publisher: WeightPublisher | None = None
        self._parts = AnsweringParts.of(
            fleet, model_path=config.model.path, seed=config.seed, episode_context=episode_context(config)
        )
        self._answers = HeldOutAnswers(self._parts, sampling=fleet.sampling_for)

    async def __aenter__(self) -> GreedyAccuracy:
        if self._is_first:
            await self._parts.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.close()
        if self._publisher is not None:
            self._publisher.close()
        self._directory.cleanup()

    async def accuracy(self, trainer: Trainer, step: int) -> float:
        """Return the mean reward of greedy answers to the held-out prompts.

        All ranks must call this method. All get the same result. ``step`` is the number of updates so far, which is
        used as the policy version.
        """
        if self._publisher is None:
            directory = _first_of([self._directory.name], trainer.mesh)
            self._publisher = WeightPublisher(PretrainedShards.of(trainer), directory, keep=2)
        offer = self._publisher.publish(step).result()
        result = [0.0]
        if offer is not None:
            await self._parts.engine.load_weights(offer)
            answered = await self._answers.answer(self._held_out, version=step, num_samples=0)
            rewards = [one.greedy for one in answered if one.greedy is not None]
            if not rewards:
                raise RewardError(f"no held-out prompt has a reward: {answered[0].reward_failure}")
            result = [sum(rewards) / len(rewards)]
        return _first_of(result, trainer.mesh)


def _first_of(value: list[Any], mesh: LearnerMesh) -> Any:
    """Return, on each rank, the first value of the list that rank 0 passed. All ranks must call this function."""
    return gather_values(value[0], type(value[0]), dist.group.WORLD if mesh.num_ranks > 1 else None)[0]
