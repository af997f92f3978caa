"""Warnings about conditions that stop a policy from learning: equal rewards in all groups, and collapsed entropy."""

from __future__ import annotations

from collections import deque

from .records import StepRecord

WINDOW = 5
"""Number of consecutive steps with a condition before it is reported; a single batch may be equal by chance."""
COLLAPSED = 0.01
"""Collapsed entropy, as a share of the first steps' mean: the policy samples almost one answer per prompt."""
ALL_BUT_EQUAL = 0.9
"""Low entropy is reported only if at least this share of the groups has equal rewards."""


class LearningSignals:
    """Checks the records of the steps for conditions that stop learning."""

    def __init__(self) -> None:
        self._recent: deque[StepRecord] = deque(maxlen=WINDOW)
        self._first_entropies: list[float] = []
        self._holding: dict[str, bool] = {}

    def step(self, record: StepRecord) -> list[str]:
        """Return one line per condition that begins with this step.

        Args:
            record: The step. Its ``learner`` metrics may contain ``entropy``, in nats per token.
        """
        if self._recent and record.step <= self._recent[-1].step:  # the learner has returned to a checkpoint
            self._recent.clear()
        self._recent.append(record)
        found = {"equal rewards": self._equal_rewards(), "entropy": self._entropy(record.learner.get("entropy"))}
        began = [line for name, line in found.items() if line and not self._holding.get(name)]
        self._holding = {name: bool(line) for name, line in found.items()}
        return began

    def _equal_rewards(self) -> str:
        """A warning if all groups have equal rewards, else empty."""
        if len(self._recent) < WINDOW or any(record.equal_reward_groups < 1 for record in self._recent):
            return ""
        rewards = [record.reward for record in self._recent]
        which = f"all are {rewards[-1]:g}" if min(rewards) == max(rewards) else f"on average {rewards[-1]:.3g}"
        return (
            f"nothing to learn from: in the last {WINDOW} steps the rewards were equal within every group ({which}), "
            "so group advantages are 0; check the reward on samples/ or choose prompts that the policy solves sometimes"
        )

    def _entropy(self, entropy: float | None) -> str:
        """A warning if the entropy has collapsed, else empty."""
        if entropy is None:
            return ""
        if len(self._first_entropies) < WINDOW:
            self._first_entropies.append(entropy)
            return ""
        first = sum(self._first_entropies) / WINDOW
        recent = [record.learner.get("entropy", first) for record in self._recent]
        is_varied = min(record.equal_reward_groups for record in self._recent) < ALL_BUT_EQUAL
        if max(recent) >= COLLAPSED * first or is_varied:
            return ""
        return (
            f"the policy hardly explores anymore: its entropy fell from {first:.3g} to {entropy:.3g} nats per token, "
            f"at reward {self._recent[-1].reward:.3g}; unless this is intended, lower learner.optimizer.lr, "
            "raise algorithm.clip_high or algorithm.entropy_coef, and restart from an earlier checkpoint"
        )
