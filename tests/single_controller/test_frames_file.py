import io

import pytest

from asyncrl.core.errors import WireError
from asyncrl.single_controller import serialization


def written(frames):
    file = io.BytesIO()
    serialization.write_frames(file, frames)
    return file.getvalue()


def test_frames_come_back_and_begin_at_multiples_of_64():
    frames = [b"header", b"", b"x" * 100, memoryview(b"yy")]
    data = written(frames)
    assert [bytes(frame) for frame in serialization.read_frames(data)] == [bytes(frame) for frame in frames]
    assert data.index(b"header") % 64 == data.index(b"xxx") % 64 == 0


def test_every_truncation_is_a_wire_error():
    data = written([b"header", b"x" * 70])
    for end in range(len(data)):
        with pytest.raises(WireError):
            serialization.read_frames(data[:end])


def test_a_file_that_claims_too_much_is_refused():
    data = written([b"header"])
    with pytest.raises(WireError, match="truncated"):
        serialization.read_frames(data[:8] + b"\xff\xff\xff\xff" + data[12:])
    with pytest.raises(WireError):
        serialization.read_frames(data + b"more")
