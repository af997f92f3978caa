"""The keys of the roles are replaced while a buffer server runs."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.core.errors import DeadlineError, NotAllowed
from buffer import BufferClient, BufferConfig, BufferRole, BufferSupervisor, client_keys, make_keys
from buffer.keys import add_keys, put_keys, retire_keys, server_keys
from tests.support.buffer_groups import AnyRole, prompt, rollout, running

CONTROLLER, ROLLOUT, LEARNER = BufferRole.controller, BufferRole.rollout, BufferRole.learner
NUM_STEPS = 60


async def rotate(control: AnyRole, directory: Path) -> None:
    keys = add_keys(directory)
    await control.renew_keys()
    put_keys(directory, keys)
    retire_keys(directory)
    await control.renew_keys()


def without_file(directory: Path, role: BufferRole):
    """Return a role's keys without the path of the key file. A client with these keys cannot read newer keys."""
    return replace(client_keys(directory, role), path=None)


@pytest.mark.long
@pytest.mark.parametrize("stores", [0, 2])
@pytest.mark.parametrize("host", ["", "127.0.0.1"], ids=["unix", "port"])
async def test_no_request_is_lost_while_keys_are_replaced_and_old_keys_are_refused_afterwards(tmp_path, stores, host):
    make_keys(tmp_path)
    config = BufferConfig(keys=str(tmp_path), max_lag=1, num_store_servers=stores, host=host, request_timeout_s=20.0)
    with BufferSupervisor(config, groups_per_step=2, log_path=tmp_path / "log") as server:
        control, worker, learner = (
            AnyRole(server.connection.for_role(role).client()) for role in (CONTROLLER, ROLLOUT, LEARNER)
        )
        stolen = AnyRole(
            BufferClient(server.connection.address, request_timeout_s=2.0, keys=without_file(tmp_path, CONTROLLER))
        )
        copied = without_file(tmp_path, ROLLOUT)
        assert (await stolen.stats()).learner_version == 0

        async def produce() -> None:
            for _ in range(2 * NUM_STEPS):
                [lease] = await worker.lease(0, 1) if not made else await worker.lease(made // 2, 1)
                await worker.put(rollout(lease, num_tokens=50_000))

        made, groups = 0, []

        async def train() -> None:
            nonlocal made
            for version in range(NUM_STEPS):
                await control.enqueue([prompt(2 * version), prompt(2 * version + 1)])
                plan = await control.plan(version)
                groups.extend(await learner.fetch([group.group_id for group in plan.groups]))
                await control.commit(version)
                made = 2 * (version + 1)

        working = asyncio.gather(produce(), train())
        for _ in range(3):
            await asyncio.sleep(0.1)
            await rotate(control, tmp_path)
        await asyncio.wait_for(working, 120)
        assert sorted(group.group_id for group in groups) == list(range(2 * NUM_STEPS))
        stats = await control.stats()
        assert stats.groups["consumed"] == 2 * NUM_STEPS
        assert not stats.groups["dropped"]
        with pytest.raises(DeadlineError):
            await stolen.stats()
        thief = AnyRole(BufferClient(server.connection.address, request_timeout_s=20.0, keys=copied))
        with pytest.raises(NotAllowed, match="refuses this client's key"):
            await thief.stats()
        assert (await control.inspect())["unknown_keys"] >= 2
        for client in (control, worker, learner, stolen, thief):
            await client.close()
    assert server_keys(tmp_path).former_publics == {}
    assert [path.stat().st_mode & 0o777 for path in tmp_path.glob("*.json")] == [0o600] * 7


async def test_clients_that_were_idle_or_unconnected_during_key_rotations_get_replies(tmp_path):
    make_keys(tmp_path)
    async with running(groups_per_step=1, keys=str(tmp_path)) as run:
        control, idle, away = (run.client(keys=client_keys(tmp_path, CONTROLLER)) for _ in range(3))
        await idle.stats()
        for _ in range(2):
            await rotate(control, tmp_path)
        assert (await idle.stats()).learner_version == 0
        assert (await away.stats()).learner_version == 0, "the old keys must still be accepted"


async def test_an_interrupted_replacement_of_keys_excludes_no_client_and_can_be_repeated(tmp_path):
    make_keys(tmp_path)
    old = without_file(tmp_path, ROLLOUT)
    add_keys(tmp_path)  # as if the process that replaces the keys died here
    async with running(groups_per_step=1, keys=str(tmp_path)) as run:
        control = run.client(keys=client_keys(tmp_path, CONTROLLER))
        assert (await run.client(keys=old).stats()).learner_version == 0
        keys = add_keys(tmp_path)
        await control.renew_keys()
        put_keys(tmp_path, keys)  # as if the process died here when it tried again
        assert (await run.client(keys=old).stats()).learner_version == 0
        await rotate(control, tmp_path)
        with pytest.raises(NotAllowed):
            await run.client(keys=old).stats()
        assert (await control.stats()).learner_version == 0


async def test_a_restarted_server_uses_the_newest_keys(tmp_path):
    make_keys(tmp_path / "keys")
    config = BufferConfig(
        keys=str(tmp_path / "keys"),
        durability="disk",
        directory=str(tmp_path / "journal"),
        socket_folder=str(tmp_path / "s"),
    )
    with BufferSupervisor(config, groups_per_step=1, log_path=tmp_path / "log") as server:
        control = AnyRole(server.connection.client())
        await control.stats()
    new = add_keys(tmp_path / "keys")
    put_keys(tmp_path / "keys", new)
    retire_keys(tmp_path / "keys")
    with BufferSupervisor(config, groups_per_step=1, log_path=tmp_path / "log"):
        assert (await control.stats()).learner_version == 0
        await control.close()


async def test_a_client_keeps_its_old_key_if_it_cannot_read_the_file_of_the_new_key(tmp_path, caplog):
    make_keys(tmp_path)
    async with running(groups_per_step=1, keys=str(tmp_path)) as run:
        control, worker = (run.client(keys=client_keys(tmp_path, role)) for role in (CONTROLLER, ROLLOUT))
        await worker.stats()
        keys = add_keys(tmp_path)
        await control.renew_keys()
        put_keys(tmp_path, keys)
        (tmp_path / "rollout.json").chmod(0o644)
        assert (await worker.stats()).learner_version == 0, "the old key must still be accepted"
        assert "is readable by other users" in caplog.text
        (tmp_path / "rollout.json").chmod(0o600)
        retire_keys(tmp_path)
        await control.renew_keys()
        assert (await worker.stats()).learner_version == 0


async def test_only_the_controller_may_renew_keys(tmp_path):
    make_keys(tmp_path)
    async with running(groups_per_step=1, keys=str(tmp_path)) as run:
        with pytest.raises(NotAllowed, match="must not send renew_keys"):
            await run.client(keys=client_keys(tmp_path, BufferRole.inspector)).renew_keys()
    async with running(groups_per_step=1) as run:
        with pytest.raises(Exception, match=r"has no keys to replace"):
            await run.client().renew_keys()
    values = json.loads((tmp_path / "server.json").read_text())
    assert set(values) == {"public", "secret", "role_publics", "former_publics"}
