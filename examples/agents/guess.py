"""A game with ``reset`` and ``step``, as in Gymnasium: guess a number from 1 to 100.

Run this game with ``rollout_fleet.environment.name=gym`` and
``rollout_fleet.environment.options={env: examples/agents/guess.py:GuessTheNumber, kwargs: {max_guesses: 7}}``.
"""

from __future__ import annotations

import random
import re
from typing import Any


class GuessTheNumber:
    """One game. The seed decides the number, so all rollouts of a prompt have the same number."""

    def __init__(self, highest: int = 100, max_guesses: int = 7) -> None:
        self.highest = highest
        self.max_guesses = max_guesses

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin a new game with a random number. Return the first message for the policy, and an empty dictionary."""
        self.number = random.Random(seed).randint(1, self.highest)
        self.guesses = 0
        return f"Guess my number from 1 to {self.highest}. You have {self.max_guesses} guesses.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a guess (the policy's text), and return the five values of Gymnasium's ``step``.

        The values are the answer to the guess, the reward (1 for the right number), ``terminated``, ``truncated``, and
        an empty dictionary.
        """
        self.guesses += 1
        is_last = self.guesses == self.max_guesses
        numbers = re.findall(r"\d+", action)
        if not numbers:
            return "Say a number.", 0.0, False, is_last, {}
        guess = int(numbers[-1])
        if guess == self.number:
            return "Right!", 1.0, True, False, {}
        return ("Higher." if guess < self.number else "Lower."), 0.0, False, is_last, {}
