"""Episodes: rollouts of several turns, with tools and environments between them."""

from .episode import PROMPT, Episode, EpisodeBudget
from .renderer import ChatRenderer, load_renderer
from .session import Answer, ChatRequest, SampleOptions, Session, SessionCounts, TextRequest, TurnSampler

__all__ = [
    "PROMPT",
    "Answer",
    "ChatRenderer",
    "ChatRequest",
    "Episode",
    "EpisodeBudget",
    "SampleOptions",
    "Session",
    "SessionCounts",
    "TextRequest",
    "TurnSampler",
    "load_renderer",
]
