"""Connections to an SGLang server that break between two calls. The servers of these tests are fakes."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import suppress

import numpy as np
import pytest

from asyncrl.core.errors import EngineError, WorkerDiedError
from rollout_fleet.config import EngineDevice, RolloutFleetConfig, SamplingConfig
from rollout_fleet.engines import sglang
from rollout_fleet.engines.engine import SampleRequest
from rollout_fleet.engines.sglang import SGLangClient, SGLangEngine
from rollout_fleet.engines.sglang_server import SERVER_KEEP_ALIVE_S, SGLangServer


class ResettingServer:
    """A server that answers the first request of a connection with ``{}``. The second one gets a reset."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.server: asyncio.Server | None = None

    async def start(self) -> str:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answered in (True, False):
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    await reader.readexactly(int(line.split(b":")[1]))
            self.requests.append(head.split(b" ")[1].decode())
            if answered:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
                await writer.drain()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


@pytest.fixture
async def server():
    server = ResettingServer()
    yield server
    if server.server is not None:
        server.server.close()


@pytest.fixture
async def client(server, tmp_path, monkeypatch):
    monkeypatch.setattr(sglang, "DEATH_GRACE_S", 0.1)
    owner = SGLangServer(
        RolloutFleetConfig(), model_path="", device=EngineDevice.cpu, rank=0, log_dir=str(tmp_path), seed=0
    )
    monkeypatch.setattr(owner, "wait_exit", asyncio.Event().wait)  # the server process never exits
    monkeypatch.setattr(SGLangServer, "url", await server.start())
    client = SGLangClient(owner)
    await client.open()
    yield client
    await client.close()


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/weights_checker", "/pause_generation"])
async def test_the_client_repeats_a_call_after_an_idle_connection_was_reset(client, server, path):
    assert await client.call("POST", "/continue_generation", {}) == {}
    assert await client.call("POST", path, {}) == {}
    assert server.requests == ["/continue_generation", path, path]


async def test_the_client_does_not_repeat_a_failed_generation_request(client, server):
    await client.call("POST", "/continue_generation", {})
    with pytest.raises(EngineError, match="sglang-0 could not be reached for POST /generate"):
        await anext(client.stream("/generate", {}))
    assert server.requests == ["/continue_generation", "/generate"]


class StreamingServer:
    """A server that answers every request with a stream of one event. The stream ends a short time after the event."""

    def __init__(self) -> None:
        self.num_connections = self.num_requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
                self.num_requests += 1
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                event = {
                    "output_ids": [1],
                    "meta_info": {
                        "output_token_logprobs": [[-0.5, 1, None]],
                        "completion_tokens": 1,
                        "finish_reason": {"type": "stop"},
                        "weight_versions": [{"version": "0", "start": 0, "end": 1}],
                    },
                }
                for data in (json.dumps(event).encode(), b"[DONE]"):
                    part = b"data: " + data + b"\n\n"
                    writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.02)
                writer.write(b"0\r\n\r\n")
        writer.close()


async def test_several_batches_of_samples_reuse_one_connection(client, tmp_path, monkeypatch):
    streaming = StreamingServer()
    async with await asyncio.start_server(streaming.serve, "127.0.0.1", 0) as server:
        monkeypatch.setattr(SGLangServer, "url", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        (tmp_path / "config.json").write_text('{"vocab_size": 50, "eos_token_id": 1}')
        engine = SGLangEngine(
            RolloutFleetConfig(),
            model_path=str(tmp_path),
            device=EngineDevice.cpu,
            rank=0,
            log_dir="",
            seed=0,
            server=client.server,
        )
        engine._come_up()
        await engine.client.open()
        for index in range(5):
            request = SampleRequest(id=str(index), prompt_ids=np.array([3]), sampling=SamplingConfig())
            assert len([output async for _, output in engine.generate([request])]) == 1
        await engine.client.close()
    assert (streaming.num_requests, streaming.num_connections) == (5, 1)


def test_the_client_drops_idle_connections_before_the_server_does(client, tmp_path):
    assert client.server.environment(tmp_path)["SGLANG_TIMEOUT_KEEP_ALIVE"] == str(SERVER_KEEP_ALIVE_S)
    assert sglang.CLIENT_KEEP_ALIVE_S < SERVER_KEEP_ALIVE_S / 2


class AnsweringServer:
    """A server that sends the same answer to every request, in small parts. Then it closes the connection."""

    def __init__(self, body: bytes, *, status: int = 200, part_bytes: int = 1 << 20) -> None:
        self.body, self.status, self.part_bytes = body, status, part_bytes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), b":0")
        await reader.readexactly(int(length.split(b":")[1]))
        writer.write(f"HTTP/1.1 {self.status} Said\r\nConnection: close\r\n\r\n".encode())
        for start in range(0, len(self.body), self.part_bytes):
            writer.write(self.body[start : start + self.part_bytes])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()


@pytest.fixture
async def answering(client, monkeypatch):
    """Return a function that sets the answer to all further requests of the client."""
    servers = []

    async def answer(body: bytes, **options: int) -> SGLangClient:
        servers.append(await asyncio.start_server(AnsweringServer(body, **options).serve, "127.0.0.1", 0))
        monkeypatch.setattr(SGLangServer, "url", f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}")
        await client.close()
        await client.open()
        return client

    yield answer
    for server in servers:
        server.close()


async def test_the_error_of_a_refused_call_has_status_and_text(answering):
    client = await answering(b"too long", status=400)
    with pytest.raises(EngineError, match=r"sglang-0 answered POST /generate with 400: b'too long'"):
        await anext(client.stream("/generate", {}))
    with pytest.raises(EngineError, match=r"sglang-0 answered POST /pause_generation with 400: b'too long'"):
        await client.call("POST", "/pause_generation", {})


async def test_an_answer_that_is_not_json_is_an_engine_error(answering):
    client = await answering(b"data: {oh no}\n\n")
    with pytest.raises(EngineError, match=r"answered POST /generate with .* not JSON .*oh no"):
        await anext(client.stream("/generate", {}))
    with pytest.raises(EngineError, match=r"answered GET /model_info with .* not JSON .*oh no"):
        await client.call("GET", "/model_info")


async def test_an_empty_answer_is_none(answering):
    client = await answering(b"")
    assert await client.call("POST", "/continue_generation", {}) is None


@pytest.mark.parametrize("part_bytes", [1, 7, 1 << 20])
async def test_the_client_reads_whole_events_from_any_network_fragments(answering, part_bytes):
    client = await answering(b'data: {"a": 1}\n\ndata: {"b": [2]}\n\ndata: [DONE]\n\n', part_bytes=part_bytes)
    events = [event async for together in client.stream("/generate", {}) for event in together]
    assert events == [{"a": 1}, {"b": [2]}]


async def test_a_closed_client_names_the_call_that_it_did_not_send(client):
    await client.close()
    with pytest.raises(EngineError, match="sglang-0 is not running; POST /pause_generation cannot be sent"):
        await client.call("POST", "/pause_generation", {})


async def test_the_client_reports_the_death_of_the_server_and_not_a_broken_connection(client, server, monkeypatch):
    async def died() -> None:
        raise WorkerDiedError("sglang-0 died with exit status 9")

    monkeypatch.setattr(client.server, "wait_exit", died)
    await client.call("POST", "/continue_generation", {})
    with pytest.raises(WorkerDiedError, match="exit status 9"):
        await client.call("POST", "/weights_checker", {})
    assert server.requests == ["/continue_generation", "/weights_checker"], "the request must not be sent again"
