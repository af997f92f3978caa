"""Answers held-out prompts while a policy is fine-tuned, with the in-process engine of rank 0."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from asyncrl.config import RunConfig
from asyncrl.protocol.types import Prompt
from learner.trainer import Trainer
from learner.weights import SnapshotWriter
from rollout_fleet.config import EngineKind
from rollout_fleet.engines.factory import make_engine
from rollout_fleet.engines.model_files import load_decoder
from rollout_fleet.evaluation import evaluate_prompts
from rollout_fleet.rewards.reward_processes import RewardProcesses
from rollout_fleet.types import EvaluationResult


class HeldOutEvaluator:
    """Answers held-out prompts greedily with the weights of the moment; on rank 0, the other ranks hear the result."""

    def __init__(self, config: RunConfig, held_out: Sequence[Prompt]) -> None:
        self._config = replace(config.rollout_fleet, engine=EngineKind.transformers)
        self._model_path = config.model.path
        self._held_out = held_out
        self._is_first = int(os.environ.get("RANK", "0")) == 0
        self._directory = tempfile.TemporaryDirectory(prefix="asyncrl-sft-")
        self._writer = SnapshotWriter(self._directory.name, keep=2)
        self._engine = make_engine(self._config, model_path=self._model_path, rank=0, log_dir="", seed=config.seed)
        self._rewards = RewardProcesses(self._config.reward, num_processes=1, timeout_s=self._config.reward_timeout_s)
        self._decode = load_decoder(self._model_path)

    async def __aenter__(self) -> HeldOutEvaluator:
        if self._is_first:
            await self._engine.start()
            await self._rewards.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.stop()
        await self._rewards.close()
        self._directory.cleanup()

    async def accuracy(self, trainer: Trainer, step: int) -> float:
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
            rewards=self._rewards,
            decode=self._decode,
            sampling=replace(self._config.sampling, temperature=0.0),
            num_samples=1,
        )
