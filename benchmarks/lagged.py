"""Trains at an exact lag in one process: every batch is sampled with the weights from ``lag`` learner steps earlier.

asyncrl's own code chooses prompts and batches, samples, trains and publishes. This process does these tasks one after
another. So the lag is the same at every step after the first ``lag`` steps, and a run takes seconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoTokenizer

from asyncrl.config import RunConfig
from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import Plan, Prompt, WeightOffer
from asyncrl.data.prompts import PromptStream, load_eval_prompts
from asyncrl.weights.publish import WeightPublisher
from learner.advantages import BatchAdvantages
from learner.batching import rank_batches
from learner.losses import policy_objective
from learner.model_shards import PretrainedShards
from learner.trainer import LearnerStep, Trainer
from learner.types import group_sequences
from rollout_fleet.engines.engine import RunningSample, SampleOutput, SampleRequest, load_decoder, read_model_facts
from rollout_fleet.engines.transformers import GenerationModel
from rollout_fleet.rewards import REWARDS


@dataclass(frozen=True, kw_only=True)
class LaggedOutcome:
    """The outcome of one training.

    Attributes:
        curve: The sampled held-out accuracy of each learner version, including version 0.
        metrics: The metrics of the final step, by name.
        seconds: Wall time.
    """

    curve: dict[int, float]
    metrics: dict[str, float]
    seconds: float

    @property
    def final(self) -> float:
        """Held-out accuracy of the final policy version."""
        return self.curve[max(self.curve)]

    @property
    def area(self) -> float:
        """Mean held-out accuracy over the training: area under `curve` (trapezoidal rule), divided by the steps."""
        versions = sorted(self.curve)
        return float(np.trapezoid([self.curve[version] for version in versions], versions) / versions[-1])


class LaggedTraining:
    """A training at a constant lag. Call `run` only once.

    Args:
        config: The options of the run; ``model.path`` is the initial policy.
        lag: Learner version that trains on a batch, minus the version that sampled the batch. 0 is on-policy. The first
            ``lag`` + 1 batches are sampled with version 0.
        eval_every: Learner steps between evaluations.
        eval_samples: Samples per held-out prompt.
    """

    def __init__(self, config: RunConfig, *, lag: int, eval_every: int, eval_samples: int) -> None:
        path = config.model.path
        tokenizer = AutoTokenizer.from_pretrained(path)
        self._config = config
        self._lag = lag
        self._eval_every = eval_every
        self._eval_samples = eval_samples
        self._prompts = PromptStream(config.data, tokenizer, seed=config.seed)
        self._held_out = load_eval_prompts(config.data, tokenizer)
        self._decode = load_decoder(path)
        self._reward = REWARDS.get(config.rollout_fleet.reward)
        self._engine = GenerationModel(
            path, facts=read_model_facts(path), dtype="float32", device="cpu", seed=config.seed
        )
        self._trainer = Trainer(
            config.learner,
            model_path=path,
            total_updates=config.total_steps * config.algorithm.num_mini_batches,
            temperature=config.rollout_fleet.sampling.temperature,
            seed=config.seed,
        )
        self._advantages = BatchAdvantages(config.algorithm, self._trainer.mesh)
        objective = policy_objective(config.algorithm)
        self._step = LearnerStep(self._trainer, objective, num_mini_batches=config.algorithm.num_mini_batches)

    def run(self) -> LaggedOutcome:
        """Train for ``total_steps`` learner steps.

        Return the held-out accuracies, the metrics of the final step, and the wall time.
        """
        began_s, metrics = time.monotonic(), {}
        self._engine.load()
        with (
            tempfile.TemporaryDirectory(prefix="asyncrl-lagged-") as folder,
            closing(WeightPublisher(PretrainedShards.of(self._trainer), folder, keep=self._lag + 2)) as publisher,
        ):
            snapshots = [_alone(publisher.publish(0))]
            curve = {0: self._accuracy(snapshots[0])}
            for version in range(self._config.total_steps):
                metrics = self._one_step(version, snapshots[max(0, version - self._lag)])
                snapshots.append(_alone(publisher.publish(version + 1)))
                if (version + 1) % self._eval_every == 0 or version + 1 == self._config.total_steps:
                    curve[version + 1] = self._accuracy(snapshots[-1])
        return LaggedOutcome(curve=curve, metrics=metrics, seconds=time.monotonic() - began_s)

    def _one_step(self, version: int, behavior: WeightOffer) -> dict[str, float]:
        algorithm = self._config.algorithm
        self._engine.load_weights(behavior, timeout_s=self._config.rollout_fleet.load_timeout_s)
        groups = self.roll_out(self._prompts.take(algorithm.groups_per_step), behavior.version)
        plan = Plan(version=version, groups=[group.summary for group in groups])
        (batch,) = rank_batches(plan, algorithm, num_shards=1, max_lag=self._lag)
        by_id = {group.group_id: group for group in groups}
        sequences = [
            sequence
            for share in batch.shares
            for sequence in group_sequences(by_id[share.group_id], samples=share.samples, mini_batch=share.mini_batch)
        ]
        sequences, _ = self._advantages.assign(sequences, batch.rewards)
        return self._step.run(sequences)

    def roll_out(self, prompts: Sequence[Prompt], version: int) -> list[TrajectoryGroup]:
        """Sample one group per prompt with the weights of ``version``, and score the samples."""
        outputs = self._generate(prompts, self._config.algorithm.samples_per_prompt, version)
        groups = []
        for prompt, samples in zip(prompts, outputs, strict=True):
            given, rewards = Turn.given(prompt.prompt_ids), self._rewards(prompt, samples).tolist()
            trajectories = [
                Trajectory(turns=(given, sample.turn(parent=0)), reward=reward)
                for sample, reward in zip(samples, rewards, strict=True)
            ]
            groups.append(TrajectoryGroup.from_trajectories(trajectories, group_id=prompt.group_id, attempt=0))
        return groups

    def _accuracy(self, snapshot: WeightOffer) -> float:
        """Sample answers to held-out prompts; return the mean reward. Torch's random state does not change."""
        self._engine.load_weights(snapshot, timeout_s=self._config.rollout_fleet.load_timeout_s)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._config.seed)
            outputs = self._generate(self._held_out, self._eval_samples, snapshot.version)
        return float(
            np.concatenate(
                [self._rewards(p, samples) for p, samples in zip(self._held_out, outputs, strict=True)]
            ).mean()
        )

    def _generate(self, prompts: Sequence[Prompt], num_samples: int, version: int) -> list[list[SampleOutput]]:
        """Return one list per prompt. Each list has ``num_samples`` samples."""
        requests = [
            SampleRequest(
                id=f"{prompt.group_id}-{index}",
                prompt_ids=prompt.prompt_ids,
                sampling=self._config.rollout_fleet.sampling,
            )
            for prompt in prompts
            for index in range(num_samples)
        ]
        outputs = self._engine.generate([RunningSample(request) for request in requests], version)
        return [outputs[start : start + num_samples] for start in range(0, len(outputs), num_samples)]

    def _rewards(self, prompt: Prompt, samples: Sequence[SampleOutput]) -> np.ndarray:
        texts = [self._decode(sample.token_ids.tolist()) for sample in samples]
        return np.asarray([self._reward(prompt, text) for text in texts], dtype=np.float32)


def _alone(pending: Future[WeightOffer | None]) -> WeightOffer:
    """Wait until a publish is finished, and return its offer. The learner's only rank, rank 0, makes the offer."""
    offer = pending.result()
    assert offer is not None
    return offer
