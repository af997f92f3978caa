"""A sharded model that runs on packed sequences. Policy, reference, critic and reward model are such models.

All ranks call the methods together. Each rank passes its own sequences, possibly none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import attention_kept
from .attention_kernels import AttentionShape, attention_kernel
from .config import SELECTIVE, AttentionKernel, LearnerConfig
from .fsdp import LearnerMesh, open_mesh, parameter_types, shard_model, with_memory_options
from .heads import LogProbHead, PackedHead
from .lora import adapters_off, fill_adapters
from .packing import MicroBatch, Packer, tokens_in_loss
from .pretrained import fill_pretrained
from .roles import Role
from .rope import length_limit
from .selftest import SelfTest, SelfTestResult
from .types import TokenSequence
from .ulysses import UlyssesShardingManager, validate_ulysses_config

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One rank's sequences of a batch, packed into micro-batches, and counts over all ranks.

    Attributes:
        micro_batches: This rank's micro-batches; all ranks have the same number.
        num_tokens: Number of tokens in the loss, over all ranks.
        num_trajectories: Number of trajectories with at least one token in the loss, over all ranks.
    """

    micro_batches: list[MicroBatch]
    num_tokens: int
    num_trajectories: int

    def counts(self) -> dict[str, float]:
        """Return three counts as metrics by name: tokens in the loss, trajectories, and micro-batches."""
        return {
            "num_tokens": float(self.num_tokens),
            "num_trajectories": float(self.num_trajectories),
            "num_micro_batches": float(len(self.micro_batches)),
        }

    def with_columns(self, sequences: Sequence[TokenSequence]) -> PackedBatch:
        """Return a copy of the batch whose micro-batches have the columns of ``sequences``.

        ``sequences`` must be the sequences that were packed into the batch, in the same order.
        """
        return replace(self, micro_batches=[each.with_columns(sequences) for each in self.micro_batches])

    def pinned(self) -> PackedBatch:
        """Return a copy of the batch in page-locked memory."""
        return replace(self, micro_batches=[each.pinned() for each in self.micro_batches])


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """Settings of a `PackedModel` that the caller chooses.

    Example: ``benchmarks/full_size.py`` uses these settings to measure a full-size model without a GPU.

    Attributes:
        mesh: This rank's position in an existing process group.
        attention: The attention kernel to use. `PackedModel` does not test this kernel.
        reads_weights: If False, the parameters do not get values, and the self-test is skipped.
    """

    mesh: LearnerMesh
    attention: AttentionKernel
    reads_weights: bool = False


class PackedModel:
    """Loads the model of a role (such as the critic), shards it over the ranks, and runs it on micro-batches.

    Args:
        config: The learner group's options.
        role: Defines which model to load and what to compute.
        model_path: Directory in Hugging Face layout.
        temperature: Softmax temperature of log-probs, > 0; in RL the sampling temperature.
        setup: Mesh and attention kernel to use. None joins the learner's process group (`open_mesh`) and selects a
            kernel.

    Attributes:
        head: The sharded module, which contains the Hugging Face model.
        mesh: This rank's position in the process group.
        types: Dtypes of the parameters, for computation and for storage.
        selftest: The result of the self-test of the loaded model; None if it was skipped.

    Raises:
        ValueError: the learner would compute this model incorrectly.
    """

    def __init__(
        self,
        config: LearnerConfig,
        role: Role,
        *,
        model_path: str,
        temperature: float = 1.0,
        setup: ModelSetup | None = None,
    ) -> None:
        _check_temperature(temperature)
        self.config = config
        self.role = role
        self.model_path = model_path
        self.mesh: LearnerMesh = open_mesh(config) if setup is None else setup.mesh
        self.sharding = UlyssesShardingManager(self.mesh.device_mesh)
        self.types = parameter_types(config, self.mesh.device)
        self.head: PackedHead = role.build(model_path, config, self.types, temperature)
        pretrained = self.head.pretrained
        shape = AttentionShape.of(pretrained.config)
        self.head.attention = (
            attention_kernel(config.attention, self.mesh.device, self.types.compute, shape)
            if setup is None
            else setup.attention
        )
        text = pretrained.config.get_text_config()
        validate_ulysses_config(getattr(text, "num_attention_heads", config.sp_size), config.sp_size)
        config = self.config = with_memory_options(config, pretrained, self.mesh.device)
        if config.activation_checkpointing:
            contexts = {"context_fn": attention_kept} if config.activation_checkpointing == SELECTIVE else {}
            pretrained.gradient_checkpointing_enable({"use_reentrant": False, **contexts})
        self._length_limit = length_limit(pretrained.config.get_text_config().to_dict())
        shard_model(self.head, self.mesh, config)
        self.selftest: SelfTestResult | None = None
        if setup is None or setup.reads_weights:
            fill_pretrained(pretrained, model_path)
            fill_adapters(pretrained)
            if config.skip_selftest:
                log.warning("%s: the self-test is skipped: %s", model_path, config.skip_selftest)
            else:
                test = SelfTest(self.head, self.mesh, self.sharding, dtype=self.types.compute, name=model_path)
                self.selftest = test.run()

    @property
    def pretrained(self) -> PreTrainedModel:
        """The Hugging Face model inside `head`."""
        return self.head.pretrained

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the computation and of published weights."""
        return self.types.compute

    def scores(self, sequences: Sequence[TokenSequence], packed: PackedBatch | None = None) -> list[np.ndarray]:
        """Return what the role's head computes for each of this rank's sequences: log-probs, values or a reward.

        The result has one array per sequence, [T] float32, with 0 at tokens outside the loss. A reward is at the last
        token. ``packed`` may be the result of `pack` for the same sequences.
        """
        return self._run(sequences, packed)[0]

    def log_probs_and_entropies(self, sequences: Sequence[TokenSequence]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return a pair: the log-probs, and the entropies in nats. Both are lists with one array per sequence.

        The arrays are [T] float32, with 0 at tokens outside the loss.
        """
        log_probs, entropies = self._run(sequences, None, entropy=True)
        return log_probs, entropies

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Return a context in which log-probs are computed with another softmax temperature, > 0."""
        _check_temperature(temperature)
        head = cast("LogProbHead", self.head)
        before, head.temperature = head.temperature, temperature
        try:
            yield
        finally:
            head.temperature = before

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Return a context in which the model computes with its weights from before the training.

        The context turns the model's adapters off. Raises `ValueError` for a trained model without adapters.
        """
        if self.role.objective is None:
            yield
            return
        with adapters_off(self.head):
            yield

    @torch.no_grad()
    def _run(
        self, sequences: Sequence[TokenSequence], packed: PackedBatch | None, **asked: bool
    ) -> list[list[np.ndarray]]:
        self.set_training(False)
        whole, results = self.head.per_sequence, []
        packed = packed or self.pack(sequences)
        with self.sharding:
            for micro_batch in packed.micro_batches:
                outputs = self.head(micro_batch.to(self.mesh.device), **asked)
                results = results or [
                    [np.zeros(len(s.input_ids), dtype=np.float32) for s in sequences] for _ in outputs
                ]
                places = [slice(-1, None) if whole else sequences[i].loss_mask for i in micro_batch.source]
                for rows, values in zip(results, outputs, strict=True):
                    left = values.float().cpu().numpy()
                    for source, place in zip(micro_batch.source, places, strict=True):
                        count = len(rows[source][place])
                        rows[source][place], left = left[:count], left[count:]
        return results

    def set_training(self, training: bool) -> None:
        """Put the model into training mode or evaluation mode."""
        if self.head.training != training:
            self.head.train(training)

    def pack(
        self, sequences: Sequence[TokenSequence], *, keep_branches: bool = False, mesh: LearnerMesh | None = None
    ) -> PackedBatch:
        """Pack this rank's sequences into micro-batches. All ranks call this method together.

        All ranks get the same number of micro-batches. The columns of the micro-batches are empty.
        `PackedBatch.with_columns` fills them, for example with advantages.
        If the head computes one number per sequence, all tokens are packed. Otherwise, only the tokens before a
        sequence's last token in the loss are packed.

        Args:
            sequences: This rank's sequences.
            keep_branches: Raise `ValueError` if the branches of a trajectory do not fit into one micro-batch.
            mesh: The ranks agree on the number of micro-batches over this mesh; None is the model's mesh.
        """
        mesh = mesh or self.mesh
        self._check_lengths(sequences, mesh)
        sp_size, budget = mesh.sp_size, self.config.option_name(self.role.name, "max_tokens_per_micro_batch")
        in_loss = tokens_in_loss(sequences).values()
        counts = torch.tensor([sum(in_loss), sum(map(bool, in_loss))], device=mesh.device)
        num_tokens, num_trajectories = mesh.sum_over_dp(counts).tolist()
        packer = Packer(
            max_tokens=self.config.max_tokens_per_micro_batch * sp_size,
            budget=budget if sp_size == 1 else f"{budget} of {sp_size} sequence-parallel ranks",
            whole=self.head.per_sequence,
            together=self.selftest is None or self.selftest.packs,
            share_prompts=self._shares_prompts,
            keep_branches=keep_branches,
        )
        micro_batches = packer.pack(
            sequences, columns=False, agree=lambda needed: int(mesh.largest(torch.tensor(needed)))
        )
        return PackedBatch(micro_batches=micro_batches, num_tokens=num_tokens, num_trajectories=num_trajectories)

    @property
    def _shares_prompts(self) -> bool:
        can = not self.head.recurrent.layers if self.selftest is None else self.selftest.shares
        return self.config.share_prompts and can

    def _reduce(self, sums: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        names = list(sums[0])
        table = torch.stack([torch.stack([row[name].double() for name in names]) for row in sums]).sum(0)
        return dict(zip(names, self.mesh.sum_over_dp(table).tolist(), strict=True))

    def _check_lengths(self, sequences: Sequence[TokenSequence], mesh: LearnerMesh) -> None:
        """Raise `ValueError`, on all ranks, if a sequence is longer than the model's `length_limit`."""
        if self._length_limit is None:
            return
        limit, reason = self._length_limit
        longest = max((len(sequence.input_ids) for sequence in sequences), default=0)
        longest = int(mesh.largest(torch.tensor(longest)))
        if longest > limit:
            raise ValueError(
                f"{self.model_path!r}: {reason} beyond {limit} tokens, so sequences must not be longer, got {longest} "
                "tokens; lower data.max_prompt_tokens or rollout_fleet.sampling.max_new_tokens"
            )


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"the learner's temperature must be > 0, got {temperature}; training needs random samples")
