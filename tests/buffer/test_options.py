"""The buffer's options, from a run's configuration to the ledger."""

import json
import resource
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import zmq

from asyncrl.cli.compose import compose_run
from buffer import BufferConfig, BufferProcess
from buffer.server import config_from_json
from buffer.sockets import allow_clients, client_context
from tests.support.buffer_groups import AnyRole, prompt, rollout


def test_every_option_reaches_the_server_unchanged():
    config = BufferConfig(
        filters=["equal_rewards"],
        order="tests.support.orders_of_mine:longest_first",
        on_stale="requeue",
        heartbeat_s=2.5,
    )
    assert config_from_json(json.loads(json.dumps(asdict(config)))) == config
    with pytest.raises(ValueError, match=r"unknown buffer options \['max_lagg'\]; the known options are"):
        config_from_json({"max_lagg": 1})


async def test_a_filter_of_the_command_line_drops_equal_rewards_and_other_groups_fill_the_batch(tmp_path: Path):
    config = compose_run(["buffer.filters=[equal_rewards]", "buffer.max_lag=0"])
    with BufferProcess(config.buffer, groups_per_step=2, log_path=tmp_path / "log") as process:
        client = AnyRole(process.address, request_timeout_s=10.0)
        await client.enqueue([prompt(i) for i in range(12)])
        num_put = 0
        while num_put < 2:
            for lease in await client.lease(0, 2):
                solved = lease.prompt.group_id % 3 != 0
                await client.put(rollout(lease, rewards=(1.0, 1.0) if solved else (0.0, 1.0)))
                num_put += not solved
        plan = await client.plan(0)
        assert [group.group_id for group in plan.groups] == [0, 3]
        assert np.ptp([group.rewards for group in plan.groups], axis=1).all()
        stats = await client.commit(0)
        assert (stats.groups["dropped"], stats.groups_dropped) == (2, {"equal_rewards": 2})
        assert stats.tokens_dropped == {"equal_rewards": 10}
        assert stats.tokens_trained == 10
        await client.close()


def test_every_option_is_documented():
    documentation = BufferConfig.__doc__ or ""
    assert [field.name for field in fields(BufferConfig) if f"\n        {field.name}:" not in documentation] == []


def test_the_limit_of_open_files_is_raised_for_the_clients_or_an_error_names_it(monkeypatch):
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    allow_clients(300)
    assert limits == [(1024, 4096)]
    allow_clients(1000)
    assert limits[-1] == (2256, 4096)
    with pytest.raises(
        ValueError, match=r"open files must be at least 8448 .* 4096 clients .*, got 4096; .*ulimit -Hn 8448"
    ):
        allow_clients(4096)
    with pytest.raises(ValueError, match=r"at least 4256 for 0 clients .* 500 store servers"):
        allow_clients(0, num_links=500)
    with pytest.raises(ValueError, match=r"at most 10922 servers .*, got 20000"):
        allow_clients(0, num_links=20_000)


def test_a_process_can_open_enough_sockets_for_hundreds_of_stores():
    allow_clients(0, num_links=200)
    context = client_context()
    sockets = [context.socket(zmq.PAIR) for _ in range(6 * 200)]
    for socket in sockets:
        socket.close(linger=0)
