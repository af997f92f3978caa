"""Reward functions: the built-ins, and a user's own by ``module:function``."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from asyncrl.protocol.types import Prompt


class Reward(Protocol):
    """Scores one response. Called in a scoring process; a built-in in the rollout worker itself."""

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        """Return the reward.

        Args:
            prompt: With its ground truth and extra columns.
            response_text: The response, decoded, without special tokens.
        """
        ...


def exact_match(prompt: Prompt, response_text: str) -> float:
    """Return 1.0 if ``response_text`` (special tokens removed) equals the prompt's ground truth, else 0.0."""
    return 1.0 if response_text == prompt.ground_truth else 0.0


BUILT_IN_REWARDS: dict[str, Reward] = {"exact_match": exact_match}


def find_reward(name: str) -> Reward:
    """Return the built-in of this name, or import ``module:function``.

    Args:
        name: Example: ``"my_rewards:unit_tests"``.

    Raises:
        ValueError: it is neither, cannot be imported, or is not callable.
    """
    if name in BUILT_IN_REWARDS:
        return BUILT_IN_REWARDS[name]
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(
            f"rollout_fleet.reward must be a built-in ({', '.join(sorted(BUILT_IN_REWARDS))}) or module:function, "
            f"got {name!r}"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"rollout_fleet.reward: {name!r} cannot be imported ({error}); is its folder on PYTHONPATH?"
        ) from error
    if not callable(function):
        raise ValueError(f"rollout_fleet.reward: {name!r} must be callable, got {type(function).__name__}")
    return cast(Reward, function)
