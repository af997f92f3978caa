"""The socket of a running training, on which its user asks for a checkpoint (``asyncrl checkpoint RUN``).

It is a Unix socket in the run's folder in shared memory (`shared_folder`), which only the user of the run may open. A
request is one line of JSON, and so is its answer. The controller's loops wake a request when its checkpoint is whole.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.core.errors import AsyncRLError, DeadlineError
from asyncrl.core.host import make_private_folder
from asyncrl.run.run_folder import SHARED_MEMORY, shared_folder

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"
_NAME = "training.sock"
_CONNECT_S = 5.0


@asynccontextmanager
async def answered_requests(run_dir: Path, checkpoint: Callable[[], Awaitable[Path]]) -> AsyncIterator[None]:
    """Answer requests inside the block; without effect on a host without shared memory.

    ``checkpoint`` saves one and returns its folder when it is whole.
    """
    if not SHARED_MEMORY.is_dir():
        yield
        return
    path = make_private_folder(shared_folder(run_dir)) / _NAME
    path.unlink(missing_ok=True)  # of a killed run in the same folder
    pending: set[asyncio.Task[None]] = set()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_answer(reader, writer, checkpoint))
        pending.add(task)
        task.add_done_callback(pending.discard)

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, checkpoint: Callable[[], Awaitable[Path]]
) -> None:
    """Answer one request. It is withdrawn if the client disconnects."""
    answer: dict[str, Any] = {"error": "the training ended before the checkpoint was complete"}
    saving: asyncio.Future[Path] | None = None
    try:
        request = json.loads(await reader.readline())
        if request != {"request": CHECKPOINT}:
            raise ValueError(f"the only request is {CHECKPOINT!r}, got {request!r}")
        saving = asyncio.ensure_future(checkpoint())
        gone = asyncio.create_task(reader.read())
        await asyncio.wait({saving, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if saving.done():
            answer = {CHECKPOINT: str(saving.result())}
    except (ValueError, AsyncRLError) as error:
        answer = {"error": str(error)}
    finally:
        if saving is not None:
            saving.cancel()
        with suppress(OSError):
            writer.write(json.dumps(answer).encode() + b"\n")
            writer.close()


def ask_for_checkpoint(run_dir: Path, *, timeout_s: float) -> Path:
    """Ask the training in ``run_dir`` for a checkpoint; returns the folder when it is whole.

    Raises:
        ValueError: no training of this folder runs on this host.
        DeadlineError: the checkpoint is not whole in time. The training continues, and still saves it.
        AsyncRLError: the training did not save it; the message has its reason.
    """
    path = shared_folder(run_dir.resolve()) / _NAME
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(min(_CONNECT_S, timeout_s))
        try:
            client.connect(str(path))
        except OSError as error:
            raise ValueError(_why_not(run_dir)) from error
        client.settimeout(timeout_s)
        client.sendall(json.dumps({"request": CHECKPOINT}).encode() + b"\n")
        try:
            line = b"".join(iter(partial(client.recv, 4096), b""))
        except TimeoutError:
            raise DeadlineError(
                f"the training in {run_dir} did not complete a checkpoint within --timeout-s={timeout_s:g} s; it is "
                "saved with the next learner step, so raise the deadline to more than one step"
            ) from None
    answer = json.loads(line or b'{"error": "the training ended"}')
    if "error" in answer:
        raise AsyncRLError(answer["error"])
    return Path(answer[CHECKPOINT])


def _why_not(run_dir: Path) -> str:
    if not (run_dir / "config.yaml").is_file():
        return f"{run_dir} must be the folder of a run, such as outputs/quickstart/<time>; it has no config.yaml"
    return (
        f"no training of {run_dir} runs on this host: it has ended, is not training yet, or runs on another host; "
        "'asyncrl runs' lists the runs and their checkpoints"
    )
