"""The Unix socket of a running training, for requests of ``asyncrl checkpoint RUN`` and ``asyncrl keys RUN``.

Only the user of the run may open the socket's folder. A request is one line of JSON. The answer is another line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.core.errors import AsyncRLError, DeadlineError
from asyncrl.core.host import make_private_folder
from asyncrl.run.run_folder import SHARED_MEMORY, shared_folder

logger = logging.getLogger(__name__)

CHECKPOINT, KEYS = "checkpoint", "keys"
_NAME = "training.sock"
_CONNECT_S = 5.0


@asynccontextmanager
async def answered_requests(run_dir: Path, **work: Callable[[], Awaitable[Path]]) -> AsyncIterator[None]:
    """Answer requests to the training while the ``async with`` block runs. Do nothing on a host without shared memory.

    ``work`` maps the name of each request to the function that carries out the request. This function returns the
    folder that ``asyncrl checkpoint`` or ``asyncrl keys`` shows to the user.
    """
    if not SHARED_MEMORY.is_dir():
        yield
        return
    path = make_private_folder(shared_folder(run_dir)) / _NAME
    path.unlink(missing_ok=True)  # remove the socket that a killed run in the same folder may have left
    pending: set[asyncio.Task[None]] = set()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_answer(reader, writer, work))
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
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, work: Mapping[str, Callable[[], Awaitable[Path]]]
) -> None:
    """Answer one request. If the client disconnects before the answer, cancel the request."""
    answer: dict[str, Any] = {"error": "the training ended before the request was done"}
    doing: asyncio.Future[Path] | None = None
    try:
        name = json.loads(await reader.readline()).get("request")
        if name not in work:
            raise ValueError(f"the requests are {', '.join(work)}, got {name!r}")
        doing = asyncio.ensure_future(work[name]())
        gone = asyncio.create_task(reader.read())
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if doing.done():
            answer = {name: str(doing.result())}
    except (ValueError, AsyncRLError) as error:
        answer = {"error": str(error)}
    finally:
        if doing is not None:
            doing.cancel()
        with suppress(OSError):
            writer.write(json.dumps(answer).encode() + b"\n")
            writer.close()


def ask_for_checkpoint(run_dir: Path, *, timeout_s: float) -> Path:
    """Ask the training in ``run_dir`` for a checkpoint. Wait until the save is complete, and return the folder.

    Raises:
        ValueError: no training of this folder runs on this host.
        DeadlineError: the checkpoint is not complete in time. The training still saves the checkpoint, and continues.
        AsyncRLError: the training did not save the checkpoint; the message has the reason.
    """
    return _ask(
        run_dir,
        CHECKPOINT,
        timeout_s=timeout_s,
        late="complete a checkpoint",
        remedy="the next learner step saves the checkpoint, so raise the deadline to more than the time of a step",
    )


def ask_for_keys(run_dir: Path, *, timeout_s: float) -> Path:
    """Ask the training in ``run_dir`` for new keys of the buffer. Return the folder of the new keys.

    The call waits until the buffer refuses the old keys.

    Raises:
        ValueError: no training of this folder runs on this host.
        DeadlineError: the keys were not replaced in time, and the training cancels the request; ask again.
        AsyncRLError: the keys were not replaced; the message has the reason.
    """
    return _ask(
        run_dir,
        KEYS,
        timeout_s=timeout_s,
        late="replace its keys",
        remedy="every client can still connect; look into the training's log, and call the command again",
    )


def _ask(run_dir: Path, request: str, *, timeout_s: float, late: str, remedy: str) -> Path:
    path = shared_folder(run_dir.resolve()) / _NAME
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(min(_CONNECT_S, timeout_s))
        try:
            client.connect(str(path))
        except OSError as error:
            raise ValueError(_why_not(run_dir)) from error
        client.settimeout(timeout_s)
        client.sendall(json.dumps({"request": request}).encode() + b"\n")
        try:
            line = b"".join(iter(partial(client.recv, 4096), b""))
        except TimeoutError:
            raise DeadlineError(
                f"the training in {run_dir} did not {late} within --timeout-s={timeout_s:g} s; {remedy}"
            ) from None
    answer = json.loads(line or b'{"error": "the training ended"}')
    if "error" in answer:
        raise AsyncRLError(answer["error"])
    return Path(answer[request])


def _why_not(run_dir: Path) -> str:
    if not (run_dir / "config.yaml").is_file():
        return f"{run_dir} must be the folder of a run, such as outputs/quickstart/<time>; it has no config.yaml"
    return (
        f"no training of {run_dir} runs on this host: it has ended, is not training yet, or runs on another host; "
        "'asyncrl runs' lists the runs and their checkpoints"
    )
