"""Makes prompts, rollouts and running buffer servers for tests of the buffer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import FinishReason, Lease, Prompt
from buffer import BufferClient, BufferConfig, ControlClient, LearnerClient, WorkerClient
from buffer.server import BufferServer
from tests.support.trajectories import make_group


def prompt(group_id: int) -> Prompt:
    return Prompt(group_id=group_id, prompt_ids=np.arange(3, dtype=np.int32), ground_truth="x", extra={"row": group_id})


def chat_prompt(group_id: int) -> Prompt:
    """Return a prompt with a value in every field."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    return Prompt(
        group_id=group_id,
        prompt_ids=np.arange(5, dtype=np.int32),
        ground_truth={"answers": ["3", None, 3.0]},
        data_source="sums",
        extra={"row": group_id},
        messages=(
            {"role": "system", "content": "Use the tool. Größe ≤ 3"},
            {"role": "user", "content": "1 + 2"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ),
        tools=({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},),
        environment="sums.py:Sums",
        environment_options={"level": 2, "seeds": [1, 2], "nested": {"strict": True}},
    )


def rollout(
    lease: Lease, *, version: int | None = None, num_tokens: int = 5, rewards: tuple[float, float] = (0.0, 1.0)
) -> TrajectoryGroup:
    version = lease.engine_version if version is None else version
    return make_group(
        group_id=lease.prompt.group_id,
        attempt=lease.attempt,
        prompt_ids=lease.prompt.prompt_ids,
        response_ids=np.arange(num_tokens, dtype=np.int32) + lease.prompt.group_id,
        response_lengths=np.array([2, num_tokens - 2], dtype=np.int32),
        response_mask=np.ones(num_tokens, dtype=bool),
        logprobs=-np.ones(num_tokens, dtype=np.float32),
        versions=np.full(num_tokens, version, dtype=np.int32),
        rewards=np.array(rewards, dtype=np.float32),
        finish_reasons=(FinishReason.stop, FinishReason.length),
    )


class AnyRole:
    """A client on one connection that has the calls of all roles: worker, controller and learner."""

    def __init__(self, to: str | BufferClient, *, name: str = "", window: int = 32, **options) -> None:
        self.connection = BufferClient(to, **options) if isinstance(to, str) else to
        self.worker = WorkerClient(self.connection, name=name, window=window)
        self._others = (ControlClient(self.connection), LearnerClient(self.connection))

    def __getattr__(self, name: str) -> Any:
        role = next((role for role in (self.worker, *self._others) if hasattr(role, name)), self.connection)
        return getattr(role, name)

    @property
    def count_generated(self) -> Callable[[], int]:
        return self.worker.count_generated

    @count_generated.setter
    def count_generated(self, count: Callable[[], int]) -> None:
        self.worker.count_generated = count

    async def connect(self) -> None:
        await self.connection.connect()


def fall_silent(client: AnyRole, patch: pytest.MonkeyPatch) -> None:
    """Make a client act like a hanging process: the connection stays open, but the client sends no heartbeats."""
    patch.setattr(client.connection.link, "post", lambda *_: None)


class Running:
    """A buffer server on this event loop, and its clients. The clients are closed together with the server."""

    def __init__(self, config: BufferConfig, groups_per_step: int) -> None:
        self.server = BufferServer(config, groups_per_step=groups_per_step)
        self.clients: list[AnyRole] = []

    def client(self, **options) -> AnyRole:
        self.clients.append(AnyRole(self.server.address, **{"request_timeout_s": 5.0, **options}))
        return self.clients[-1]

    async def __aenter__(self) -> "Running":
        return self

    async def __aexit__(self, *_) -> None:
        for client in self.clients:
            await client.close()
        self.server.close()


def running(groups_per_step: int = 2, **options) -> Running:
    return Running(BufferConfig(**{"request_timeout_s": 5.0, **options}), groups_per_step)
