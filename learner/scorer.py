"""A sharded model on packed sequences: what policy, frozen reference, critic and reward model have in common.

Every method is a collective: all ranks of the group call it together, each with its own share of the sequences, and an
empty share is fine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .config import LearnerConfig
from .fsdp import shard_model
from .lora import add_adapters
from .losses import LossInputs
from .mesh import LearnerMesh, open_mesh
from .model import PackedModel, PolicyModel, load_causal_lm
from .packing import MicroBatch, num_micro_batches, pack
from .sharding import UlyssesShardingManager
from .types import TokenSequence
from .ulysses import validate_ulysses_config


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A batch of all ranks, as one of them sees it.

    Attributes:
        micro_batches: This rank's, as many as on every other rank.
        num_tokens: Tokens in the loss, over all ranks.
        num_sequences: Sequences with at least one such token, over all ranks.
    """

    micro_batches: list[MicroBatch]
    num_tokens: int
    num_sequences: int

    def counts(self) -> dict[str, float]:
        """The counts as metrics."""
        return {
            "num_tokens": float(self.num_tokens),
            "num_sequences": float(self.num_sequences),
            "num_micro_batches": float(len(self.micro_batches)),
        }


ModelT = TypeVar("ModelT", bound=PackedModel)


class PackedScorer(Generic[ModelT]):
    """Shards a model over the group and runs it on micro-batches.

    Args:
        config: The learner group's options.
        model_path: Directory in Hugging Face layout.
        load: Loads the model with float32 parameters, on the CPU, or without its weights on the meta device where its
            argument is True: other ranks than the first receive theirs from it.
    """

    def __init__(self, config: LearnerConfig, *, model_path: str, load: Callable[[bool], ModelT]) -> None:
        self.config = config
        self.model_path = model_path
        self.mesh: LearnerMesh = open_mesh(config)
        self.sharding = UlyssesShardingManager(self.mesh.device_mesh)
        self.model = load(self.mesh.rank > 0)
        validate_ulysses_config(self.pretrained.config.num_attention_heads, config.sp_size)
        if config.activation_checkpointing:
            self.pretrained.gradient_checkpointing_enable({"use_reentrant": False})
        shard_model(self.model, self.mesh, config)

    @property
    def pretrained(self) -> PreTrainedModel:
        """The Hugging Face model inside."""
        return self.model.pretrained

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the parameters while computing, and of published weights."""
        return getattr(torch, self.config.dtype)

    @torch.no_grad()
    def _per_token(
        self, sequences: Sequence[TokenSequence], outputs: Callable[[MicroBatch], Sequence[Tensor]]
    ) -> list[list[np.ndarray]]:
        """Run the model on this rank's sequences and bring each output back to them.

        Args:
            sequences: In any order; may be empty.
            outputs: Gives a micro-batch, which is on the device, some [M] tensors.

        Returns:
            For each output a list of [T] float32 arrays, one a sequence, 0 where the token is not in the loss.
        """
        self._set_training(False)
        results: list[list[np.ndarray]] = []
        with self.sharding:
            for micro_batch in self._pack(sequences).micro_batches:
                values = outputs(micro_batch.to(self.mesh.device))
                results = results or [[np.zeros(len(s.input_ids), dtype=np.float32) for s in sequences] for _ in values]
                for rows, value in zip(results, values, strict=True):
                    parts = value.float().cpu().split(micro_batch.loss_lengths.tolist())
                    for source, part in zip(micro_batch.source, parts, strict=False):
                        rows[source][sequences[source].loss_mask] = part.numpy()
        return results

    def _set_training(self, training: bool) -> None:
        """Switch dropout on or off, where that changes anything: visiting every module takes a millisecond."""
        if self.model.training != training:
            self.model.train(training)

    def _pack(self, sequences: Sequence[TokenSequence], *, whole: bool = False) -> PackedBatch:
        """Micro-batches, as many on every rank; see `learner.packing.pack` for ``whole``."""
        budget = self.config.max_tokens_per_micro_batch * self.mesh.sp_size
        in_loss = [int(np.count_nonzero(sequence.loss_mask)) for sequence in sequences]
        counts = torch.tensor([sum(in_loss), sum(map(bool, in_loss))], device=self.mesh.device)
        num_tokens, num_sequences = self.mesh.sum_over_dp(counts).tolist()
        count = max(1, int(self.mesh.largest(torch.tensor(num_micro_batches(sequences, budget, whole=whole)))))
        micro_batches = pack(sequences, max_tokens=budget, count=count, whole=whole)
        return PackedBatch(micro_batches=micro_batches, num_tokens=num_tokens, num_sequences=num_sequences)

    def _reduce(self, sums: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Add this rank's micro-batches up, then the ranks, in one collective."""
        names = list(sums[0])
        table = torch.stack([torch.stack([row[name] for name in names]) for row in sums]).double().sum(0)
        return dict(zip(names, self.mesh.sum_over_dp(table).tolist(), strict=True))


class PolicyScorer(PackedScorer[PolicyModel]):
    """Loads a causal language model and computes log-probs under it.

    Args:
        config: The learner group's options.
        model_path: Directory in Hugging Face layout.
        temperature: Softmax temperature of log-probs; that of sampling in RL, 1.0 for supervised training. > 0.
        adapted: Give the model the adapters of ``config.lora``, where its rank is above 0.
    """

    def __init__(
        self, config: LearnerConfig, *, model_path: str, temperature: float = 1.0, adapted: bool = False
    ) -> None:
        _check_temperature(temperature)

        def load(on_meta: bool) -> PolicyModel:
            causal_lm = load_causal_lm(model_path, torch.float32, on_meta=on_meta)
            if adapted and config.lora.rank:
                add_adapters(causal_lm, config.lora)
            return PolicyModel(causal_lm, temperature=temperature, logprob_chunk_tokens=config.logprob_chunk_tokens)

        super().__init__(config, model_path=model_path, load=load)

    def log_probs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Log-probs of this rank's sequences under the weights as they are.

        Returns:
            [T] float32 a sequence, 0 where the token is not in the loss.
        """
        return self.log_probs_and_entropies(sequences)[0]

    def log_probs_and_entropies(self, sequences: Sequence[TokenSequence]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Log-probs as of `log_probs`, and the entropies in nats of the distributions, in the same layout."""
        log_probs, entropies = self._per_token(sequences, self.model)
        return log_probs, entropies

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Inside, log-probs are taken under another softmax temperature, > 0."""
        _check_temperature(temperature)
        before, self.model.temperature = self.model.temperature, temperature
        try:
            yield
        finally:
            self.model.temperature = before

    def _forward(self, micro_batch: MicroBatch) -> LossInputs:
        micro_batch = micro_batch.to(self.mesh.device)
        log_probs, entropy = self.model(micro_batch)
        # An empty micro-batch does not know the columns' names: it has every column, with no entries.
        columns = micro_batch.columns if len(log_probs) else defaultdict(log_probs.detach)
        return LossInputs(
            log_probs=log_probs,
            entropy=entropy,
            sequence_index=micro_batch.sequence_index,
            loss_lengths=micro_batch.loss_lengths,
            columns=columns,
        )


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"the learner's temperature must be > 0, got {temperature}; greedy samples teach nothing")
