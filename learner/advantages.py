"""Computes advantages from rewards: per trajectory, per token or per turn, for a batch that is divided among ranks.

Sums use float64, so that rounding does not remove small differences between large rewards. In shapes, B is the number
of trajectories. M is the number of policy tokens of all trajectories, one trajectory after the other. M does not
include tokens from an environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import TypeIs

from asyncrl.core.registry import Registry
from asyncrl.single_controller.serialization import gather_rows

from .config import AlgorithmConfig
from .fsdp import LearnerMesh
from .group_statistics import MIN_DEVIATION, centered, group_deviations, largest, members, smallest_deviation
from .losses import kl_penalty
from .turn_advantages import TurnAdvantages, TurnRewards, joined_turns, turn_gae, turn_grpo, turn_rows, with_turns
from .types import SampleKey, TokenSequence

SumOverRanks = Callable[[Tensor], Tensor]
"""A function that returns the sum of a float64 tensor over the data-parallel ranks."""

_BLOCK = 64


class Scale(StrEnum):
    """Selects how to scale the difference between a reward and the mean reward of its prompt group.

    ``std`` divides the difference by the group's standard deviation. ``none`` does not scale the difference.
    """

    std = "std"
    none = "none"


OutcomeEstimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function that gets the rewards [B] and the prompt group ids [B] int64 of trajectories from all ranks. It returns
the advantages [B]. The trajectories of a group are sorted by their index in the group."""


@dataclass(frozen=True, kw_only=True)
class TokenRewards:
    """The input of a token estimator: the trajectories of one rank.

    A user's estimator always gets whole prompt groups. The estimators of asyncrl possibly get only some trajectories of
    a group.

    Attributes:
        rewards: [M] float64, one reward per token. An outcome reward is at the last policy token of its trajectory.
        lengths: [B] int64, number of policy tokens of each trajectory, >= 0; the sum is M. Each branch (path through
            the turns of a trajectory) counts as a trajectory here.
        group_ids: [B] int64, id of the prompt group of each trajectory.
        values: [M] float64, the critic's value before each token; zeros without a critic (``algorithm.critic``).
    """

    rewards: Tensor
    lengths: Tensor
    group_ids: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """The result of a token estimator.

    Attributes:
        advantages: [M] float64, one per policy token.
        returns: [M] float64, the critic's training target at each policy token.
    """

    advantages: Tensor
    returns: Tensor


TokenEstimator: TypeAlias = Callable[[TokenRewards, AlgorithmConfig, SumOverRanks], TokenAdvantages]
"""A function that takes the rewards of one rank's tokens and returns their advantages. All ranks call it together,
because it may compute sums over ranks with its third argument."""

TurnEstimator: TypeAlias = Callable[[TurnRewards, AlgorithmConfig], TurnAdvantages]
"""A function that takes the turns of the whole batch and returns the advantages of the turns."""

AdvantageEstimator: TypeAlias = OutcomeEstimator | TokenEstimator | TurnEstimator

ADVANTAGES: Registry[AdvantageEstimator] = Registry("algorithm.advantage")


def token_level(estimator: TokenEstimator) -> TokenEstimator:
    """Mark an estimator as token-level, and return the estimator. Use this function as a decorator.

    Each rank calls a token-level estimator with the rewards of the rank's own tokens (`TokenRewards`).
    """
    _TOKEN_LEVEL.add(estimator)
    return estimator


def is_token_level(estimator: AdvantageEstimator) -> TypeIs[TokenEstimator]:
    """Return whether an estimator has the decorator `token_level`."""
    return estimator in _TOKEN_LEVEL


def turn_level(estimator: TurnEstimator) -> TurnEstimator:
    """Mark an estimator as turn-level, and return the estimator. Use this function as a decorator.

    Each rank calls a turn-level estimator with the turns of the whole batch (`TurnRewards`).
    """
    _TURN_LEVEL.add(estimator)
    return estimator


def is_turn_level(estimator: AdvantageEstimator) -> TypeIs[TurnEstimator]:
    """Return whether an estimator has the decorator `turn_level`."""
    return estimator in _TURN_LEVEL


_TOKEN_LEVEL: set[TokenEstimator] = set()
_TURN_LEVEL: set[TurnEstimator] = set()


def group_advantages(rewards: Tensor, group_ids: Tensor, *, scale: Scale) -> Tensor:
    """Subtract from each reward the mean reward of its prompt group (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
        rewards: [B] float32.
        group_ids: [B] int64; equal ids form a group, in any order.
        scale: With ``std``, the difference is divided by the group's sample standard deviation (n - 1), at least
            `MIN_DEVIATION`. With ``none``, it is not divided (Dr. GRPO, arXiv 2503.20783).

    Returns:
        The advantages, [B] float32. They are exactly 0 in a group of equal rewards. Example: rewards 1, 0, 0, 1 in one
        group with ``std`` give 0.866, -0.866, -0.866, 0.866.

    Raises:
        ValueError: a group has one member and ``scale`` is ``std``.
    """
    group, counts = members(group_ids)
    differences = centered(rewards, group, counts)
    if scale is Scale.none:
        return differences.to(torch.float32)
    _need_two(counts, "GRPO with std")
    return (differences / group_deviations(rewards, differences, group, counts)[group]).to(torch.float32)


ADVANTAGES.register("grpo")(partial(group_advantages, scale=Scale.std))
ADVANTAGES.register("grpo_no_std")(partial(group_advantages, scale=Scale.none))
ADVANTAGES.register("dr_grpo")(partial(group_advantages, scale=Scale.none))
"""``dr_grpo`` is the same as ``grpo_no_std``: the advantage of Dr. GRPO (arXiv 2503.20783, section 3.2). For the loss
of Dr. GRPO, set ``aggregation=sequence_sum_norm``."""


@ADVANTAGES.register("rloo")
def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract from each reward the mean reward of the other trajectories in its group (RLOO, arXiv 2402.14740).

    Returns the advantages, [B] float32. Raises `ValueError` if a group has one trajectory. Example: rewards 3, 0, 0
    give 3, -1.5, -1.5.
    """
    group, counts = members(group_ids)
    _need_two(counts, "RLOO")
    return (centered(rewards, group, counts) * (counts / (counts - 1))[group]).to(torch.float32)


@ADVANTAGES.register("leave_one_out_batch")
def leave_one_out_batch(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract from each reward the mean reward of all other trajectories in the batch, also of other prompt groups.

    Returns the advantages, [B] float32. Example: rewards 3, 0, 0 give 3, -1.5, -1.5.
    """
    return rloo(rewards, torch.zeros_like(group_ids))


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Center rewards per group, and divide by the batch's standard deviation (REINFORCE++-baseline, arXiv 2501.03262).

    Returns the advantages, [B] float32. Difference from verl: the standard deviation is over trajectories, not over
    tokens.

    Example: rewards 3, 1 in one group and 0, 0 in another give 1.225, -1.225, 0, 0.
    """
    differences = centered(rewards, *members(group_ids))
    _need_two(torch.tensor([len(rewards)]), "REINFORCE++-baseline")
    smallest = smallest_deviation(rewards.double().abs().max())
    return (differences / torch.maximum(differences.std(), smallest)).to(torch.float32)


@ADVANTAGES.register("remax")
def remax(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract the greedy response's reward from each reward of a group (ReMax, arXiv 2310.10505, equation 6).

    Returns the advantages, [B] float32. The last trajectory of each group must be the greedy response. The greedy
    response gets the advantage 0, and the learner does not train on it. Example: rewards 1, 0 and greedy 1 give 0, -1,
    0.
    """
    group, counts = members(group_ids)
    last = largest(torch.arange(len(group)), group, len(counts))
    return (rewards.double() - rewards.double()[last[group]]).float()


def _need_two(counts: Tensor, name: str) -> None:
    if len(counts) and int(counts.min()) < 2:
        raise ValueError(f"{name} needs at least 2 samples to compare, got 1; raise algorithm.samples_per_prompt")


@ADVANTAGES.register("gae")
@token_level
def gae(batch: TokenRewards, config: AlgorithmConfig, total: SumOverRanks) -> TokenAdvantages:
    """Compute the advantages and returns of this rank's tokens from a critic's values (`generalized_advantages`).

    With ``whiten_advantages``, the advantages are standardized over the tokens of all ranks. The value after the last
    token of a trajectory counts as 0, even if the trajectory is truncated.
    """
    advantages, returns = generalized_advantages(
        batch.rewards, batch.values, batch.lengths, gamma=config.gamma, gae_lambda=config.gae_lambda
    )
    if config.whiten_advantages:
        advantages = standardized(advantages, total)
    return TokenAdvantages(advantages=advantages, returns=returns)


@ADVANTAGES.register("reinforce_plus_plus")
@token_level
def reinforce_plus_plus(batch: TokenRewards, config: AlgorithmConfig, total: SumOverRanks) -> TokenAdvantages:
    """Use each token's discounted return as its advantage (REINFORCE++, arXiv 2501.03262, section 3).

    The advantages are standardized over the tokens of all ranks. Difference from the paper: the KL penalty compares the
    behavior policy with the reference policy. In the paper, this penalty compares the policy before the update with the
    reference policy.

    Example: one-token trajectories with rewards 3, 0, 0 give 1.155, -0.577, -0.577.
    """
    returns = returns_to_go(batch.rewards, batch.lengths, gamma=config.gamma)
    return TokenAdvantages(advantages=standardized(returns, total), returns=returns)


ADVANTAGES.register("turn_gae")(turn_level(turn_gae))
ADVANTAGES.register("turn_grpo")(turn_level(partial(turn_grpo, has_deviation=True)))
ADVANTAGES.register("turn_grpo_no_std")(turn_level(partial(turn_grpo, has_deviation=False)))


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate generalized advantages of packed trajectories (GAE, arXiv 1506.02438, equations 11 to 16).

    A_t = δ_t + γ λ A_(t+1) with δ_t = r_t + γ V_(t+1) - V_t.

    Args:
        rewards: [M] float, one per policy token.
        values: [M] float, the critic's value before each token.
        lengths: [B] int64, number of policy tokens of each trajectory; the sum is M.
        gamma: γ, the discount per token, in [0, 1].
        gae_lambda: λ, in [0, 1].
        last_values: [B] float, the value after each trajectory's last token; default 0. Use the critic's value to
            bootstrap a truncated trajectory.

    Returns:
        A pair: advantages [M] float64, and returns (advantages + values) [M] float64. Example: rewards 0, 1 and values
        0.5, 0.6 with gamma 1 and lambda 0.5 give advantages 0.3, 0.4.
    """
    values, some = values.double(), lengths > 0
    ends = lengths.cumsum(0)[some] - 1
    deltas = torch.empty_like(values)
    deltas[:-1] = values[1:]
    deltas[ends] = 0.0 if last_values is None else last_values.double()[some]
    deltas.mul_(gamma).sub_(values).add_(rewards)
    advantages = _sum_backwards(deltas, ends, gamma * gae_lambda)
    return advantages, advantages + values


def returns_to_go(rewards: Tensor, lengths: Tensor, *, gamma: float) -> Tensor:
    """Return [M] float64: for each token, the discounted sum of the rewards from this token to the trajectory's end.

    ``rewards`` [M] has one reward per policy token. ``lengths`` [B] int64 is the number of policy tokens of each
    trajectory. Example: rewards 1, 0, 4 of one trajectory with gamma 0.5 give 2, 2, 4.
    """
    return _sum_backwards(rewards.to(torch.float64, copy=True), lengths.cumsum(0)[lengths > 0] - 1, gamma)


def _sum_backwards(values: Tensor, ends: Tensor, factor: float) -> Tensor:
    """Compute S_t = v_t + factor · S_(t+1) for the ``values`` v, [M] float64. The result overwrites ``values``.

    ``ends`` are the positions of the trajectories' last tokens. The sum begins with 0 after each of these positions.
    """
    whole = len(values) // _BLOCK
    inside, rest = values[: whole * _BLOCK].view(whole, _BLOCK), values[whole * _BLOCK :]
    table = values.new_zeros(_BLOCK, whole + min(1, len(rest)))
    table[:, :whole], table[: len(rest), whole:] = inside.t(), rest[:, None]
    rows, (block, place) = table.unbind(), (ends // _BLOCK, ends % _BLOCK)
    blocks_ending = block[place.argsort()].split(torch.bincount(place, minlength=_BLOCK).tolist())
    for i in range(_BLOCK - 2, -1, -1):
        last = rows[i][blocks_ending[i]]
        rows[i].add_(rows[i + 1], alpha=factor)
        rows[i][blocks_ending[i]] = last
    if len(rows[0]) > 1:
        carried = rows[0].new_zeros(len(rows[0]))
        carried[:-1] = _sum_backwards(rows[0].clone(), block.unique(), factor**_BLOCK)[1:]
        last_end = torch.full((len(carried),), -1).scatter_reduce_(0, block, place, "amax")
        for i, row in enumerate(rows):
            row.add_(torch.where(last_end < i, carried, 0.0), alpha=factor ** (_BLOCK - i))
    inside.copy_(table[:, :whole].t())
    rest.copy_(table[: len(rest), whole:].view(-1))
    return values


def standardized(values: Tensor, total: SumOverRanks) -> Tensor:
    """Standardize this rank's values with the mean and the standard deviation of the values of all ranks.

    ``values`` is [M] float64. ``total`` is a function that sums a tensor over the ranks. The standard deviation (with
    n - 1) is at least `MIN_DEVIATION`. Returns [M] float64; zeros if all values of all ranks are equal.
    """
    count, sums = total(torch.tensor([len(values), float(values.sum())], dtype=torch.float64)).tolist()
    differences = values - sums / max(1.0, count)
    squares = float(total(differences.square().sum()[None]))
    # If all values are equal, their differences from the mean are rounding errors, which must not become advantages.
    mean_square = float(total(values.square().sum()[None])) / max(1.0, count)
    if count < 2 or squares / count <= 1e-24 * mean_square:
        return torch.zeros_like(values)
    return differences / max((squares / (count - 1)) ** 0.5, MIN_DEVIATION)


class AdaptiveKLCoefficient:
    """Adapts a KL coefficient to reach a target divergence (arXiv 1909.08593, section 2.2).

    ``target`` is the wanted divergence in nats per token. ``horizon`` is a number of samples; with a larger horizon the
    coefficient changes more slowly.

    Differences from the paper: the divergence is the mean over a batch's tokens. The paper uses the sum over a
    response. verl uses the mean over sequences of each sequence's mean. A batch counts as at most ``horizon`` samples,
    so one update changes the coefficient by at most a fifth.
    """

    def __init__(self, *, initial: float, target: float, horizon: int) -> None:
        self.value = initial
        self._target = target
        self._horizon = horizon

    def update(self, measured: float, num_samples: int) -> float:
        """Adapt the coefficient to the divergence of one step, and return the new coefficient.

        ``measured`` is the divergence in nats per token. A non-finite divergence changes nothing. Example: with target
        6 and horizon 10000, a divergence of 12 over 256 samples changes the coefficient 0.1 to 0.100512.
        """
        if math.isfinite(measured):
            error = min(max(measured / self._target - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * min(1.0, num_samples / self._horizon)
        return self.value


class BatchAdvantages:
    """Computes the advantage of each token from the trajectories' rewards. All data-parallel ranks must call `assign`.

    The advantages do not depend on how the batch is divided among the ranks. The KL penalty in the rewards compares the
    behavior policy, which sampled the tokens, with the reference policy, as AReaL does. In InstructGPT (arXiv
    2203.02155) and verl, the penalty compares the policy before the update with the reference policy.

    Attributes:
        kl_coefficient: The coefficient of the KL penalty in the rewards. It changes only if ``algorithm.kl_target`` is
            set.
    """

    def __init__(self, algorithm: AlgorithmConfig, mesh: LearnerMesh) -> None:
        self._algorithm = algorithm
        self._mesh = mesh
        self._estimator = ADVANTAGES.get(algorithm.advantage)
        self._numbers = {source: number for number, source in enumerate(sorted(algorithm.advantage_by_source), start=1)}
        self._by_number = [
            self._estimator,
            *(ADVANTAGES.get(algorithm.advantage_by_source[one]) for one in self._numbers),
        ]
        if len(self._by_number) > 1 and any(is_token_level(one) or is_turn_level(one) for one in self._by_number):
            raise ValueError(
                "algorithm.advantage_by_source needs estimators with one reward per trajectory, got a token-level or "
                f"turn-level estimator in {[algorithm.advantage, *algorithm.advantage_by_source.values()]}; replace it"
            )
        self.kl_coefficient = AdaptiveKLCoefficient(
            initial=algorithm.kl_reward_coef, target=algorithm.kl_target, horizon=algorithm.kl_horizon
        )

    def assign(
        self,
        sequences: Sequence[TokenSequence],
        rewards: Mapping[SampleKey, float],
        sources: Mapping[int, str] | None = None,
    ) -> tuple[list[TokenSequence], dict[str, float]]:
        """Compute advantages for this rank's sequences, and return copies of the sequences with these advantages.

        Args:
            sequences: This rank's sequences. They need the columns ``behavior_logprobs`` and ``reference_logprobs`` if
                ``kl_reward_coef`` is set, and the column ``values`` if there is a critic.
            rewards: Rewards of this rank's trajectories. Each sequence is one path through a trajectory's turns.
            sources: Data source of each group, for ``advantage_by_source``.

        Returns:
            A pair: copies of the sequences, and the metrics of the KL penalty. The copies have the column
            ``advantages`` (0 outside the loss). With a token-level or turn-level estimator they also have ``returns``.
            The metrics are ``reward_kl`` in nats per token and ``kl_reward_coef``. They are equal on all ranks.

        Raises:
            ValueError: the estimator is turn-level, and a sequence does not name its turns.
        """
        lengths = torch.tensor([int(np.count_nonzero(s.loss_mask)) for s in sequences], dtype=torch.int64)
        penalties, metrics = self._penalties(sequences, lengths, num_trajectories=len(rewards))
        if is_turn_level(self._estimator):
            rows = turn_rows(_with_column(sequences, "penalties", penalties), rewards)
            advantages, returns = self._over_the_turns(self._estimator, rows)
            assigned = with_turns(sequences, "advantages", advantages)
            return with_turns(assigned, "returns", returns), metrics
        places = {key: place for place, key in enumerate(rewards)}
        trajectory = torch.tensor([places[s.trajectory] for s in sequences], dtype=torch.int64)
        keys = self._keys(rewards, sources or {})
        outcomes = torch.tensor(list(rewards.values()), dtype=torch.float64)
        of_token = trajectory.repeat_interleave(lengths)
        if not is_token_level(self._estimator):
            each = self._over_the_batch(outcomes.index_add(0, of_token, penalties, alpha=-1), keys)
            return _with_column(sequences, "advantages", each[of_token]), metrics
        of_turns = _rewards_of_turns(sequences)
        # The trajectory's reward includes the rewards of its turns.
        # Subtract the rewards of the turns, because the last token of each turn gets the turn's reward.
        outcomes = outcomes.index_add(0, of_token, of_turns, alpha=-1)
        token_rewards = of_turns - penalties
        ends = lengths.cumsum(0) - 1
        token_rewards[ends[lengths > 0]] += outcomes[trajectory[lengths > 0]]
        has_values = all("values" in sequence.columns for sequence in sequences)
        values = _policy_tokens(sequences, "values") if has_values else torch.zeros_like(token_rewards)
        batch = TokenRewards(rewards=token_rewards, lengths=lengths, group_ids=keys[trajectory, 0], values=values)
        estimated = self._estimator(batch, self._algorithm, self._total)
        advantages, returns = _both(estimated, len(token_rewards), "policy token")
        return _with_column(_with_column(sequences, "advantages", advantages), "returns", returns), metrics

    def _keys(self, rewards: Iterable[SampleKey], sources: Mapping[int, str]) -> Tensor:
        """Return one row of three numbers per trajectory, [B, 3] int64.

        The numbers are the group's id, the trajectory's index in the group, and the number of the estimator to use.
        """
        numbers = {group_id: self._numbers.get(source, 0) for group_id, source in sources.items()}
        rows = [(group_id, index, numbers.get(group_id, 0)) for group_id, index in rewards]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3)

    def _penalties(
        self, sequences: Sequence[TokenSequence], lengths: Tensor, *, num_trajectories: int
    ) -> tuple[Tensor, dict[str, float]]:
        if not self._algorithm.kl_reward_coef:
            return torch.zeros(int(lengths.sum()), dtype=torch.float64), {}
        coefficient = self.kl_coefficient.value
        divergence = kl_penalty(
            _policy_tokens(sequences, "behavior_logprobs"),
            _policy_tokens(sequences, "reference_logprobs"),
            self._algorithm.kl_reward_estimator,
        )
        sums = torch.tensor([float(divergence.sum()), len(divergence), num_trajectories], dtype=torch.float64)
        total, num_tokens, num_samples = self._total(sums).tolist()
        mean = total / max(1.0, num_tokens)
        if self._algorithm.kl_target:
            self.kl_coefficient.update(mean, int(num_samples))
        return coefficient * divergence, {"reward_kl": mean, "kl_reward_coef": coefficient}

    def _over_the_turns(self, estimator: TurnEstimator, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        shares, own = self._gathered(rows)
        turns, order = joined_turns(shares)
        estimated = estimator(turns, self._algorithm)
        given = _both(estimated, len(order), "turn")
        each = torch.empty(len(order), 2, dtype=torch.float64)
        each[order] = torch.stack(given, dim=1).double()
        advantages, returns = each.split([len(share[0]) for share in shares])[own].unbind(1)
        return advantages, returns

    def _over_the_batch(self, outcomes: Tensor, keys: Tensor) -> Tensor:
        shares, own = self._gathered((outcomes, keys))
        all_outcomes, all_keys = (torch.cat(parts) for parts in zip(*shares, strict=True))
        # Sort the trajectories, so that their order does not depend on which rank has which trajectory.
        order = torch.from_numpy(np.lexsort((all_keys[:, 1].numpy(), all_keys[:, 0].numpy())))
        everything = torch.empty(len(order), dtype=torch.float32)
        for number in range(len(self._by_number)):
            own_rows = order[all_keys[order, 2] == number]
            if len(own_rows):
                estimator = cast("OutcomeEstimator", self._by_number[number])
                given = estimator(all_outcomes[own_rows], all_keys[own_rows, 0])
                everything[own_rows] = _one_each(given, len(own_rows), "trajectory")
        return everything.split([len(share[0]) for share in shares])[own]

    def _gathered(self, rows: tuple[Tensor, Tensor]) -> tuple[list[tuple[Tensor, Tensor]], int]:
        if dist.get_world_size(self._mesh.dp_group) == 1:
            return [rows], 0
        return gather_rows(rows, self._mesh.dp_group), self._mesh.dp_rank

    def _total(self, values: Tensor) -> Tensor:
        return self._mesh.sum_over_dp(values.to(self._mesh.device)).cpu()


def _both(estimated: TokenAdvantages | TurnAdvantages, count: int, unit: str) -> list[Tensor]:
    """Return a list of two tensors: an estimator's advantages and returns.

    Raises `ValueError` if one of the tensors does not have ``count`` numbers.
    """
    return [_one_each(values, count, unit) for values in (estimated.advantages, estimated.returns)]


def _one_each(values: Tensor, count: int, unit: str) -> Tensor:
    """Return ``values``, an estimator's result. Raises `ValueError` if it is not a tensor of ``count`` numbers."""
    if not isinstance(values, Tensor) or values.shape != (count,):
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"an estimator of algorithm.advantage must return a tensor with one number per {unit}, of shape [{count}], "
            f"got {got}"
        )
    return values


def _rewards_of_turns(sequences: Sequence[TokenSequence]) -> Tensor:
    """Return [M] float64, one number per token in the loss: a turn's reward at its last token, 0 at other tokens."""
    rewards = (np.zeros(len(s.input_ids)) if s.token_rewards is None else s.token_rewards for s in sequences)
    return _end_to_end(values[s.loss_mask] for s, values in zip(sequences, rewards, strict=True))


def _policy_tokens(sequences: Sequence[TokenSequence], name: str) -> Tensor:
    return _end_to_end(sequence.columns[name][sequence.loss_mask] for sequence in sequences)


def _end_to_end(parts: Iterable[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts])).double()


def _with_column(sequences: Sequence[TokenSequence], name: str, values: Tensor) -> list[TokenSequence]:
    if not sequences:
        return []
    column = np.zeros(sum(len(sequence.input_ids) for sequence in sequences), dtype=np.float32)
    column[np.concatenate([sequence.loss_mask for sequence in sequences])] = values.float().numpy()
    ends = [*accumulate(len(sequence.input_ids) for sequence in sequences)]
    parts = [column[start:end] for start, end in pairwise([0, *ends])]
    return [sequence.with_column(name, part) for sequence, part in zip(sequences, parts, strict=True)]
