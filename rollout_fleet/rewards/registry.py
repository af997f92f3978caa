"""Reward functions by name."""

from __future__ import annotations

from typing import Protocol

from asyncrl.protocol.types import Prompt
from rollout_fleet.naming import import_function

from .exact_match import exact_match


class Reward(Protocol):
    """Scores one response. Called in a scoring process; a built-in in the rollout worker itself."""

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        """Return the reward.

        Args:
            prompt: With its ground truth and extra columns.
            response_text: The response, decoded, without special tokens.
        """
        ...


BUILT_IN_REWARDS: dict[str, Reward] = {"exact_match": exact_match}


def find_reward(name: str) -> Reward:
    """Return the built-in of this name, or import ``module:function``.

    Raises:
        ValueError: there is none.
    """
    if name in BUILT_IN_REWARDS:
        return BUILT_IN_REWARDS[name]
    if ":" not in name:
        raise ValueError(
            f"rollout_fleet.reward must be a built-in ({', '.join(sorted(BUILT_IN_REWARDS))}) or module:function, "
            f"got {name!r}"
        )
    return import_function(name, option="rollout_fleet.reward")
