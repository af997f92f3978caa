"""Clients behind a proxy that limits the rate and adds latency."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from asyncrl.core.errors import DeadlineError
from asyncrl.core.types import Lease
from buffer.server import BufferServer
from buffer.sockets import bulk_address, make_socket_folder, remove_socket_folder, unix_address
from tests.support.buffer_groups import AnyRole, prompt, rollout, running

_PIECE = 16 * 1024
_BYTES_PER_TOKEN = 12


class _Lane:
    """One direction of a slow link.

    Payloads are sent in pieces, so a heartbeat does not wait until a whole payload is sent.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def carry(self, num_bytes: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
        if self._free_at - now > 0.01:
            await asyncio.sleep(self._free_at - now)


class SlowLink:
    """A proxy for a server. Per direction, all connections together transfer at most ``bytes_per_s``."""

    def __init__(self, server: BufferServer, *, bytes_per_s: float, latency_s: float) -> None:
        self._folder = make_socket_folder()
        self.address = unix_address(self._folder, "buffer")
        self._paths = {
            _path(own): _path(its) for own, its in zip(_both(self.address), _both(server.address), strict=True)
        }
        self._latency_s = latency_s
        self._lanes = (_Lane(bytes_per_s), _Lane(bytes_per_s))
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self.is_cut = asyncio.Event()

    async def __aenter__(self) -> "SlowLink":
        for own, its in self._paths.items():
            self._servers.append(await asyncio.start_unix_server(self._forward(its), own, limit=_PIECE))
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        remove_socket_folder(self._folder)

    def _forward(self, path: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_unix_connection(path, limit=_PIECE)
            for lane, source, sink in zip(self._lanes, (reader, there), (back, writer), strict=True):
                task = asyncio.ensure_future(self._pump(lane, source, sink))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        return forward

    async def _pump(self, lane: "_Lane", source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while piece := await source.read(_PIECE):
                await lane.carry(len(piece))
                if self.is_cut.is_set():
                    await asyncio.Event().wait()
                loop.call_later(self._latency_s, sink.write, piece)
                if sink.transport.get_write_buffer_size() > 4 * _PIECE:
                    await sink.drain()
        loop.call_later(self._latency_s, sink.close)


def _both(address: str) -> list[str]:
    return [address, bulk_address(address, 0)]


def _path(address: str) -> str:
    return address.removeprefix("ipc://")


async def renewing(client: AnyRole, leases: list[Lease], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await client.renew(leases)


@pytest.mark.long
@pytest.mark.parametrize(("megabytes_per_s", "timeout_s"), [(4.0, 2.0), (2.4, 3.0)])
async def test_a_large_put_over_a_slow_link_keeps_its_lease_and_finishes(megabytes_per_s: float, timeout_s: float):
    options = {"lease_s": 1.5, "heartbeat_s": 0.3, "request_timeout_s": timeout_s}
    rate = megabytes_per_s * 1e6
    async with (
        running(groups_per_step=1, **options) as run,
        SlowLink(run.server, bytes_per_s=rate, latency_s=0.02) as link,
    ):
        worker = AnyRole(link.address, request_timeout_s=timeout_s)
        await run.client().enqueue([prompt(0)])
        [lease] = await worker.lease(0, 1)
        renewal = asyncio.ensure_future(renewing(worker, [lease], 0.4))
        began = asyncio.get_running_loop().time()
        await worker.put(rollout(lease, num_tokens=9_000_000 // _BYTES_PER_TOKEN))
        assert asyncio.get_running_loop().time() - began > timeout_s, "the put must take longer than the timeout"
        assert not renewal.done()
        renewal.cancel()
        stats = await worker.stats()
        assert (stats.groups["stored"], stats.puts_refused) == (1, {})
        await worker.close()


async def test_a_large_put_that_makes_no_progress_ends_at_its_deadline():
    async with running(groups_per_step=1) as run, SlowLink(run.server, bytes_per_s=50e6, latency_s=0.0) as link:
        worker = AnyRole(link.address, request_timeout_s=0.7)
        await run.client().enqueue([prompt(0)])
        [lease] = await worker.lease(0, 1)
        link.is_cut.set()
        with pytest.raises(DeadlineError, match=r"no answer from .* within 0.7 s"):
            await worker.put(rollout(lease, num_tokens=1_000_000))
        await worker.close()


async def test_a_large_fetch_over_a_slow_link_finishes_after_more_than_its_timeout():
    async with running(groups_per_step=2) as run:
        local = run.client()
        await local.enqueue([prompt(i) for i in range(2)])
        for lease in await local.lease(0, 2):
            await local.put(rollout(lease, num_tokens=330_000))
        async with SlowLink(run.server, bytes_per_s=4e6, latency_s=0.0) as link:
            rank = AnyRole(link.address, request_timeout_s=1.7)
            began = asyncio.get_running_loop().time()
            groups = await rank.fetch([0, 1])
            assert asyncio.get_running_loop().time() - began > 1.7, "the fetch must take longer than the timeout"
            assert [len(group.token_ids) > 330_000 for group in groups] == [True, True]
            await rank.close()
