"""Who gets credit for a reward, where that takes what only the ranks have: reference log-probs and a critic's values.

Each rank holds whole prompt groups. What spans the batch is gathered or summed over the ranks, so the advantages do not
depend on how they share the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .config import AlgorithmConfig
from .kl import AdaptiveKLCoefficient, kl_penalty
from .mesh import LearnerMesh
from .registry import ADVANTAGES
from .token_advantages import TokenAdvantages, TokenRewards, is_token_level
from .types import TokenSequence


class CreditAssignment:
    """Turns rewards into the column ``advantages``. Its methods are collectives over the data-parallel ranks.

    A KL penalty in the rewards is that of the behaviour policy (deviation from InstructGPT, arXiv 2203.02155, and verl,
    which take the policy before the update; AReaL's decoupled loss does as we do): it is on the distribution that the
    tokens were drawn from, needs no forward, and is the same on-policy.

    Args:
        algorithm: What is optimised.
        mesh: The ranks.
    """

    def __init__(self, algorithm: AlgorithmConfig, mesh: LearnerMesh) -> None:
        self._algorithm = algorithm
        self._mesh = mesh
        self._estimator = ADVANTAGES.get(algorithm.advantage)
        self.kl_coefficient = AdaptiveKLCoefficient(
            initial=algorithm.kl_reward_coef, target=algorithm.kl_target, horizon=algorithm.kl_horizon
        )

    def assign(
        self, sequences: Sequence[TokenSequence], rewards: np.ndarray, group_ids: np.ndarray
    ) -> tuple[list[TokenSequence], dict[str, float]]:
        """Give every policy token its advantage.

        Args:
            sequences: This rank's, prompt groups whole; with ``behavior_logprobs`` and, under ``kl_reward_coef``,
                ``reference_logprobs``; with ``values`` for an estimator that reads a critic's.
            rewards: [B] float32, the outcome of each sequence.
            group_ids: [B] int64, its prompt group.

        Returns:
            The sequences with the columns ``advantages`` and, from a token-level estimator, ``returns``; and metrics,
            the same on every rank: under ``kl_reward_coef``, ``reward_kl`` in nats a token and ``kl_reward_coef``.
        """
        lengths = torch.tensor([int(np.count_nonzero(s.loss_mask)) for s in sequences], dtype=torch.int64)
        penalties, metrics = self._penalties(sequences, lengths)
        outcomes, groups = torch.from_numpy(np.asarray(rewards)).double(), torch.from_numpy(np.asarray(group_ids))
        if not is_token_level(self._estimator):
            per_sequence = self._over_the_batch(outcomes - _sums(penalties, lengths), groups)
            return _with_column(sequences, "advantages", per_sequence.repeat_interleave(lengths)), metrics
        token_rewards = -penalties
        ends = lengths.cumsum(0) - 1
        token_rewards[ends[lengths > 0]] += outcomes[lengths > 0]
        credit = self._of_tokens(sequences, token_rewards, lengths, groups)
        credited = _with_column(sequences, "advantages", credit.advantages)
        return _with_column(credited, "returns", credit.returns), metrics

    def _of_tokens(
        self, sequences: Sequence[TokenSequence], token_rewards: Tensor, lengths: Tensor, groups: Tensor
    ) -> TokenAdvantages:
        assert is_token_level(self._estimator)
        has_values = all("values" in sequence.columns for sequence in sequences)
        values = _policy_tokens(sequences, "values") if has_values else torch.zeros_like(token_rewards)
        batch = TokenRewards(rewards=token_rewards, lengths=lengths, group_ids=groups, values=values)
        return self._estimator(batch, self._algorithm, self._total)

    def _penalties(self, sequences: Sequence[TokenSequence], lengths: Tensor) -> tuple[Tensor, dict[str, float]]:
        """[M] float64 KL penalty of each policy token, and what it says about the batch."""
        if not self._algorithm.kl_reward_coef:
            return torch.zeros(int(lengths.sum()), dtype=torch.float64), {}
        coefficient = self.kl_coefficient.value
        divergence = kl_penalty(
            _policy_tokens(sequences, "behavior_logprobs"),
            _policy_tokens(sequences, "reference_logprobs"),
            self._algorithm.kl_reward_estimator,
        )
        sums = torch.tensor([float(divergence.sum()), len(divergence), len(sequences)], dtype=torch.float64)
        total, num_tokens, num_sequences = self._total(sums).tolist()
        mean = total / max(1.0, num_tokens)
        if self._algorithm.kl_target:
            self.kl_coefficient.update(mean, int(num_sequences))
        return coefficient * divergence, {"reward_kl": mean, "kl_reward_coef": coefficient}

    def _over_the_batch(self, outcomes: Tensor, groups: Tensor) -> Tensor:
        """[B] float32 advantages of this rank's sequences, estimated on those of all ranks."""
        assert not is_token_level(self._estimator)
        dp_size, own = dist.get_world_size(self._mesh.dp_group), self._mesh.dp_rank
        shares: list[tuple[Tensor, Tensor]] = [(outcomes, groups)] * dp_size
        if dp_size > 1:
            dist.all_gather_object(shares, (outcomes, groups), group=self._mesh.dp_group)
        everything = self._estimator(*(torch.cat(parts) for parts in zip(*shares, strict=True)))
        return everything.split([len(share[0]) for share in shares])[own]

    def _total(self, values: Tensor) -> Tensor:
        return self._mesh.sum_over_dp(values.to(self._mesh.device)).cpu()


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """[B] sums of [M] values over each sequence."""
    index = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, index, values)


def _policy_tokens(sequences: Sequence[TokenSequence], name: str) -> Tensor:
    """[M] float64, a column at the tokens in the loss."""
    parts = [sequence.columns[name][sequence.loss_mask] for sequence in sequences]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts])).double()


def _with_column(sequences: Sequence[TokenSequence], name: str, values: Tensor) -> list[TokenSequence]:
    """The sequences with a column that holds [M] values at the tokens in the loss, and 0 elsewhere."""
    parts = values.float().split([int(np.count_nonzero(s.loss_mask)) for s in sequences])
    columns = [np.zeros(len(sequence.input_ids), dtype=np.float32) for sequence in sequences]
    for column, sequence, part in zip(columns, sequences, parts, strict=True):
        column[sequence.loss_mask] = part.numpy()
    return [sequence.with_column(name, column) for sequence, column in zip(sequences, columns, strict=True)]
