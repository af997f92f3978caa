"""Plays one episode of an environment in a child process, with a scripted policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.core.types import Prompt
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.episodes.config import EnvironmentConfig
from rollout_fleet.episodes.environment import Outcome
from rollout_fleet.episodes.environment_processes import EnvironmentProcesses
from tests.support.policy_endpoint import PolicyEndpoint, echo


def make_prompt(text: str = "hello", **fields: Any) -> Prompt:
    ids = np.asarray([3, 4], dtype=np.int32)
    messages = ({"role": "user", "content": text},)
    return Prompt(**{"group_id": 7, "prompt_ids": ids, "messages": messages, **fields})


async def play(
    name: str,
    options: dict[str, Any] | None = None,
    script: Any = echo,
    *,
    prompt: Prompt | None = None,
    **environment: Any,
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Play an episode of the environment ``name``. Returns a pair: the outcome, and the bodies of the policy requests.

    ``options`` are the environment's options. ``environment`` sets further fields of `EnvironmentConfig`.
    """
    config = EnvironmentConfig(name=name, options=options or {}, **environment)
    environments = EnvironmentProcesses(RolloutFleetConfig(environment=config))
    await environments.start()
    try:
        async with PolicyEndpoint(script) as endpoint:
            return await environments.run(prompt or make_prompt(), endpoint.open(), sample=0), endpoint.requests
    finally:
        await environments.close()
