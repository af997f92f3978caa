"""A minimal buffer on ZMQ, for a comparison with the real buffer.

The minimal buffer stores frames under a key, acknowledges them, and returns them on request. It checks nothing.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

import zmq


def serve() -> None:
    """Run the minimal buffer: print its address, then answer requests until the process is killed."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")
    print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    stored: dict[bytes, list[zmq.Frame]] = {}
    while True:
        sender, operation, *frames = socket.recv_multipart(copy=False)
        if operation.bytes == b"put":
            key, *stored[frames[0].bytes] = frames
            socket.send_multipart([sender, key])
        else:
            parts = [part for key in frames for part in stored.pop(key.bytes)]
            socket.send_multipart([sender, b"got", *parts], copy=False)


class RawStore:
    """A blocking client of the minimal buffer. The constructor starts the minimal buffer (`serve`) in a new process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.buffer_raw"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(self._process.stdout.readline().strip())

    def put_all(self, payloads: Sequence[Sequence[Any]], window: int) -> None:
        """Store every payload (a list of frames) under its index, and wait for all acknowledgements.

        At most ``window`` payloads are sent and not yet acknowledged.
        """
        in_flight = 0
        for number, payload in enumerate(payloads):
            if in_flight == window:
                self._socket.recv_multipart()
                in_flight -= 1
            large = sum(memoryview(frame).nbytes for frame in payload) >= 64 * 1024
            self._socket.send_multipart([b"put", b"%d" % number, *payload], copy=not large)
            in_flight += 1
        for _ in range(in_flight):
            self._socket.recv_multipart()

    def get(self, numbers: Sequence[int]) -> list[zmq.Frame]:
        """Fetch and remove the payloads with the given indices; return all received ZMQ frames."""
        self._socket.send_multipart([b"get", *(b"%d" % number for number in numbers)])
        return self._socket.recv_multipart(copy=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    serve()
