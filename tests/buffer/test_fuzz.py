"""Coverage-guided fuzzing of everything that reads bytes from the network (``-m slow``; needs atheris)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGET = """
import sys, asyncio
import atheris
with atheris.instrument_imports(include=["buffer", "asyncrl.core"]):
    from asyncrl.core.errors import WireError
    from buffer import BufferConfig, encoding
    from buffer.service import BufferService

loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)

async def feed(frames):
    service = BufferService(BufferConfig(queue_size=4, max_stored_bytes=1000), groups_per_step=1, send=lambda *_: None)
    try:
        for request in encoding.parse_requests(frames)[1]:
            request.body = encoding.operation_of(request)
            service.handle(request)
        service.settle()
    except WireError:
        pass
    finally:
        service.close()

def one(data):
    provider = atheris.FuzzedDataProvider(data)
    frames = [provider.ConsumeBytes(provider.ConsumeIntInRange(0, 200)) for _ in range(3)]
    loop.run_until_complete(feed(frames))
    for read in (encoding.group_of, encoding.prompt_of):
        try:
            read(frames)
        except WireError:
            pass

atheris.Setup(sys.argv, one)
atheris.Fuzz()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_bytes_cause_only_wire_errors(tmp_path: Path):
    pytest.importorskip("atheris", reason="coverage-guided fuzzing needs the fuzz extra: pip install asyncrl[fuzz]")
    target = tmp_path / "target.py"
    target.write_text(TARGET)
    command = [sys.executable, str(target), "-max_total_time=120", "-rss_limit_mb=2048", str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, timeout=280
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
