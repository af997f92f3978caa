"""Episodes: rollouts of several turns, with tools and environments between them.

Each name in ``__all__`` is imported at its first use, because child processes may lack the packages of some modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import use_tools
    from .endpoint import Access, Endpoint
    from .environment import Environment, EpisodeFailure, FailureKind, Outcome, Policy, ToolError
    from .episode import PROMPT, Episode, EpisodeBudget
    from .renderer import ChatRenderer, load_renderer
    from .session import ChatRequest, SampledAnswer, SampleOptions, Session, SessionCounts, TextRequest, TurnSampler

__all__ = [
    "PROMPT",
    "Access",
    "ChatRenderer",
    "ChatRequest",
    "Endpoint",
    "Environment",
    "Episode",
    "EpisodeBudget",
    "EpisodeFailure",
    "FailureKind",
    "Outcome",
    "Policy",
    "SampleOptions",
    "SampledAnswer",
    "Session",
    "SessionCounts",
    "TextRequest",
    "ToolError",
    "TurnSampler",
    "load_renderer",
    "use_tools",
]
_PLACES = {
    "adapters": ("use_tools",),
    "endpoint": ("Access", "Endpoint"),
    "environment": ("Environment", "EpisodeFailure", "FailureKind", "Outcome", "Policy", "ToolError"),
    "episode": ("PROMPT", "Episode", "EpisodeBudget"),
    "renderer": ("ChatRenderer", "load_renderer"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = next((place for place, names in _PLACES.items() if name in names), "session")
    return getattr(import_module(f".{place}", __name__), name)
