"""Environments over the interfaces of other agents and environments; each imports its package when it is used."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.core.types import Prompt

    from .environment import Policy


class FunctionEnvironment:
    """A function ``main(prompt, policy, **options)`` or ``main(prompt, base_url, api_key, **options)``.

    The second form is for agents that bring a client of their own, such as an unmodified ``openai`` client. A function
    that is not async runs in a thread.

    Raises:
        ValueError: the function has other parameters.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function = function
        self._options = options
        self.replayable = getattr(function, "replayable", True)
        parameters = inspect.signature(function)
        self._has_policy = "base_url" not in parameters.parameters
        arguments = ("prompt", "policy") if self._has_policy else ("prompt", "base_url", "api_key")
        try:
            parameters.bind(*arguments, **options)
        except TypeError as error:
            raise ValueError(
                f"{function.__name__}{parameters} must take (prompt, policy) or (prompt, base_url, api_key), and "
                f"rollout_fleet.environment.options={dict(options)}: {error}"
            ) from error

    async def run(self, prompt: Prompt, policy: Policy) -> Any:
        """Call the function; `Outcome.of` converts what it returns."""
        arguments = (prompt, policy) if self._has_policy else (prompt, policy.base_url, policy.api_key)
        if inspect.iscoroutinefunction(self._function):
            return await self._function(*arguments, **self._options)
        return await asyncio.to_thread(self._function, *arguments, **self._options)
