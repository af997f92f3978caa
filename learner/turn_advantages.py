"""Advantages of turns: one number per sampled turn, for trajectories that are trees of turns.

Where a tree forks, a turn has several next turns. The estimators then average over the next turns, because each next
turn is a sample of the continuation. The *index* of a turn is the number of sampled turns before it on its path from
the prompt. Turns of a prompt, a tool or an environment were not sampled, and do not have an advantage.

The reward of a sampled turn includes the rewards of the unsampled turns up to the next sampled turn. The KL penalty of
the turn's tokens is subtracted. The last turn of each path also gets the trajectory's outcome, which is its reward
minus the rewards of its turns. In shapes, K is the number of sampled turns of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .config import AlgorithmConfig
from .group_statistics import centered, group_deviations, group_sums, members
from .types import SampleKey, TokenSequence

TurnRows = tuple[Tensor, Tensor]
"""Sampled turns as rows of two tensors. The first tensor is [K, 4] int64. Its columns are group id, index of the
trajectory in the group, index of the turn in the group, index of the previous turn in the group (-1 for a first turn).
The second tensor is [K, 3] float64. Its columns are reward, critic's value, number of tokens in the loss."""


@dataclass(frozen=True, kw_only=True)
class TurnRewards:
    """The sampled turns of a whole batch, the input of a turn estimator.

    The turns of a trajectory are adjacent and in order.

    Attributes:
        rewards: [K] float64, reward of each turn. The reward of the last turn of each path includes the trajectory's
            outcome (the trajectory's reward minus the rewards of its turns).
        values: [K] float64, the critic's value before the turn's first token; zeros without a critic, NaN for a turn
            without a token in the loss.
        num_tokens: [K] int64, number of tokens in the loss. A turn without tokens in the loss still counts in the means
            with which other turns are compared.
        previous: [K] int64, position in these arrays of the previous turn on the path; -1 for a first turn.
        trajectories: [K] int64, a number that identifies the trajectory of each turn.
        group_ids: [K] int64, id of each turn's prompt group.
    """

    rewards: Tensor
    values: Tensor
    num_tokens: Tensor
    previous: Tensor
    trajectories: Tensor
    group_ids: Tensor

    @cached_property
    def index(self) -> Tensor:
        """[K] int64: for each turn, the number of sampled turns before it on its path."""
        index, above = torch.zeros_like(self.previous), self.previous
        while (is_below := above >= 0).any():
            index = index + is_below
            above = torch.where(is_below, self.previous[above.clamp(min=0)], -1)
        return index

    @property
    def levels(self) -> list[Tensor]:
        """Positions in the [K] arrays, as one int64 tensor for each different value in `index`, smallest value first.

        All turns of one tensor have the same number of sampled turns before them on their paths.
        """
        return [torch.nonzero(self.index == level)[:, 0] for level in self.index.unique().tolist()]


@dataclass(frozen=True, kw_only=True)
class TurnAdvantages:
    """The result of a turn estimator.

    Attributes:
        advantages: [K] float64. All tokens of a turn get the turn's advantage.
        returns: [K] float64, the critic's training target for the tokens of each turn.
    """

    advantages: Tensor
    returns: Tensor


def turn_gae(batch: TurnRewards, config: AlgorithmConfig) -> TurnAdvantages:
    """Estimate generalized advantages over turns (Turn-PPO, arXiv 2512.17008; ArCHer's utterances, arXiv 2402.19446).

    A_k = δ_k + γ λ A_(k+1) with δ_k = r_k + γ V_(k+1) - V_k (GAE, arXiv 1506.02438, equation 16). V_k is the critic's
    value before the first token of turn k. γ is ``gamma`` and λ is ``gae_lambda``. After the last turn of a path, V and
    A are 0. ``whiten_advantages`` standardizes the advantages over the batch, with the same weight for each trajectory.

    Differences from the papers: Turn-PPO clips the ratio of a whole turn. ArCHer trains a separate critic off-policy.

    Example: turns with rewards 0, 1 and values 0.5, 0.6, with γ = 1 and λ = 0.5, give 0.3, 0.4.
    """
    num_next = torch.bincount(batch.previous[batch.previous >= 0], minlength=len(batch.previous)).clamp(min=1)
    values, advantages = batch.values.clone(), torch.zeros_like(batch.values)
    next_values, next_advantages = torch.zeros_like(values), torch.zeros_like(values)
    for rows in reversed(batch.levels):
        after = batch.rewards[rows] + config.gamma * next_values[rows]
        values[rows] = torch.where(values[rows].isnan(), after, values[rows])
        carried = config.gamma * config.gae_lambda * next_advantages[rows]
        advantages[rows] = after - values[rows] + carried
        below = rows[batch.previous[rows] >= 0]
        above = batch.previous[below]
        next_values.index_add_(0, above, values[below] / num_next[above])
        next_advantages.index_add_(0, above, advantages[below] / num_next[above])
    returns = advantages + values
    if config.whiten_advantages:
        advantages = _standardized(advantages, batch)
    return TurnAdvantages(advantages=advantages, returns=returns)


def turn_grpo(batch: TurnRewards, config: AlgorithmConfig, *, has_deviation: bool) -> TurnAdvantages:
    """Compare the return of a turn with the returns of all turns that have the same index in the prompt group.

    The index of a turn is the number of sampled turns before it on its path. The return of turn k is Σ γ^(j - k) r_j
    over the turns j >= k of the path. The advantage is return - mean. With ``has_deviation``, this difference is
    divided by the sample standard deviation. Mean and deviation are over the group's trajectories with a turn of this
    index. A trajectory that forks may have n turns of this index. Each of these n turns then has the weight 1/n. If no
    other trajectory has a turn of this index, the turn gets the advantage of the previous turn on its path. A first
    turn gets 0.

    Sources: the turn-level advantages of MT-GRPO (arXiv 2505.11821) and the step groups of GiGPO (arXiv 2505.10978).
    Difference from the papers: both papers add the advantage of the whole trajectory with a weight. Here, the return
    contains the outcome.

    Example: a group of three trajectories with turns of rewards (0, 1), (0, 0) and (0.5). The returns are 1, 0, 0.5 for
    index 0, and 1, 0 for index 1. Without ``has_deviation``, the advantages are (0.5, 0.5), (-0.5, -0.5) and (0).
    """
    returns = batch.rewards.clone()
    num_next = torch.bincount(batch.previous[batch.previous >= 0], minlength=len(returns)).clamp(min=1)
    levels = batch.levels
    for rows in reversed(levels):
        below = rows[batch.previous[rows] >= 0]
        above = batch.previous[below]
        returns.index_add_(0, above, config.gamma * returns[below] / num_next[above])
    place, sizes = members(torch.stack([batch.trajectories, batch.index], dim=1))
    weights = 1.0 / sizes[place].double()
    group, sizes = members(torch.stack([batch.group_ids, batch.index], dim=1))
    counts = group_sums(weights, group, len(sizes)).round()  # the number of trajectories per group and turn index
    advantages = centered(returns, group, counts, weights=weights)
    if has_deviation:
        advantages = advantages / group_deviations(returns, advantages, group, counts, weights=weights)[group]
    is_alone = counts[group] < 2
    advantages[is_alone] = 0.0
    for rows in levels[1:]:
        alone = rows[is_alone[rows]]
        advantages[alone] = advantages[batch.previous[alone]]
    return TurnAdvantages(advantages=advantages, returns=returns)


def _standardized(advantages: Tensor, batch: TurnRewards) -> Tensor:
    """Standardize advantages over the n trajectories with turns in the loss (standard deviation with n - 1).

    Each trajectory has the weight 1, divided equally among its turns. Turns outside the loss are ignored, and their
    result is 0.
    """
    is_in_loss = batch.num_tokens > 0
    trajectory, sizes = members(batch.trajectories[is_in_loss])
    standardized = torch.zeros_like(advantages)
    if len(sizes) < 2:
        return standardized
    counted, whole = advantages[is_in_loss], torch.zeros_like(trajectory)
    weights, counts = 1.0 / sizes[trajectory].double(), torch.tensor([len(sizes)])
    differences = centered(counted, whole, counts, weights=weights)
    standardized[is_in_loss] = differences / group_deviations(counted, differences, whole, counts, weights=weights)[0]
    return standardized


def turn_rows(sequences: Sequence[TokenSequence], rewards: Mapping[SampleKey, float]) -> TurnRows:
    """Return the turns of a rank's sequences as two tensors with one row per turn, in the order of the sequences.

    `TurnRows` lists the columns of both tensors. The sequences need the column ``penalties`` (KL penalty per token)
    and, with a critic, ``values``. ``rewards`` has the reward of each trajectory, including the rewards of its turns.

    Raises:
        ValueError: a sequence has tokens in the loss and does not name its turns.
    """
    outcomes, followed = dict(rewards), set[tuple[SampleKey, int]]()
    for sequence in sequences:
        if not sequence.turns and sequence.loss_mask.any():
            raise ValueError(
                f"a turn-level advantage needs the turns of each sequence, got none for trajectory "
                f"{sequence.trajectory}; make the sequences with learner.types.group_sequences"
            )
        for turn in sequence.turns:
            outcomes[sequence.trajectory] -= turn.reward
            followed.add((sequence.trajectory, turn.previous))
    ids, numbers = [], []
    for sequence in sequences:
        key, values, penalties = sequence.trajectory, sequence.columns.get("values"), sequence.columns["penalties"]
        for turn in sequence.turns:
            span = slice(turn.start, turn.stop)
            num_tokens = int(np.count_nonzero(sequence.loss_mask[span]))
            value = 0.0 if values is None else float(values[turn.start]) if num_tokens else np.nan
            outcome = 0.0 if (key, turn.turn) in followed else outcomes[key]
            ids.append((*key, turn.turn, turn.previous))
            numbers.append((turn.reward + outcome - float(penalties[span].sum()), value, num_tokens))
    return torch.tensor(ids, dtype=torch.int64).view(-1, 4), torch.tensor(numbers, dtype=torch.float64).view(-1, 3)


def joined_turns(shares: Sequence[TurnRows]) -> tuple[TurnRewards, np.ndarray]:
    """Join the turns of all ranks into one batch, sorted by trajectory and turn.

    ``shares`` has the result of `turn_rows` for each rank. Returns a pair: the batch, and an array [K] int64. For each
    turn of the batch, the array has the row of this turn in the concatenated results of all ranks.
    """
    ids, numbers = (torch.cat(parts) for parts in zip(*shares, strict=True))
    trajectories, _ = members(ids[:, :2])
    # Sort the turns, so that their order does not depend on which rank has which turn.
    order = np.lexsort((ids[:, 2].numpy(), trajectories.numpy()))
    ids, numbers, trajectories = ids[order], numbers[order], trajectories[order]
    span = int(ids[:, 2].max()) + 1 if len(ids) else 1
    places, before = trajectories * span + ids[:, 2], trajectories * span + ids[:, 3]
    batch = TurnRewards(
        rewards=numbers[:, 0],
        values=numbers[:, 1],
        num_tokens=numbers[:, 2].long(),
        previous=torch.where(ids[:, 3] >= 0, torch.searchsorted(places, before), -1),
        trajectories=trajectories,
        group_ids=ids[:, 0],
    )
    return batch, order


def with_turns(sequences: Sequence[TokenSequence], name: str, values: Tensor) -> list[TokenSequence]:
    """Return copies of the sequences with one more column: at each token in the loss, the value of the token's turn.

    The column is 0 elsewhere. ``values`` [K] has one value per turn of the sequences, in the order of `turn_rows`.
    """
    rest, spread = iter(values.tolist()), []
    for sequence in sequences:
        column = np.zeros(len(sequence.input_ids), dtype=np.float32)
        for turn in sequence.turns:
            column[turn.start : turn.stop] = next(rest)
        spread.append(sequence.with_column(name, np.where(sequence.loss_mask, column, np.float32(0))))
    return spread
