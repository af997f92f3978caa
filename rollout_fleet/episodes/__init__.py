"""Episodes: rollouts of several turns, with tools and environments between them."""

from .episode import PROMPT, Episode, EpisodeBudget

__all__ = ["PROMPT", "Episode", "EpisodeBudget"]
