"""Stands in for a process that a fork server makes; see `asyncrl.cli.fork_server`. Runs as a file, with `-I -S`.

Usage: ``python -I -S fork_proxy.py SERVER ARGUMENTS...``, as ``python ARGUMENTS...``

It lives as long as the process, and ends as it did. It waits for the server's word alone: that the process was begun,
then how it ended. Where there is no server any more it becomes the process itself, which takes longer.
"""

import json
import os
import signal
import socket
import struct
import sys

LENGTH = struct.Struct("<Q")
BEGUN = b"b"
STATUS = struct.Struct("<i")
"""Exit status of the process; minus the number of the signal that it died of."""


def address_of(name: str) -> str:
    """The socket of the server of this name: in no file system, so nobody has to remove it."""
    return f"\0{name}"


def main() -> int:
    """Have the process made, wait for its end, and return its exit status."""
    name, *arguments = sys.argv[1:]
    answer = _run(address_of(name), arguments)
    if answer is None:
        sys.stderr.write(f"{name} is gone: this process imports everything itself\n")
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *arguments])
    if len(answer) < STATUS.size:
        sys.stderr.write(f"{name} has died, and this process with it\n")
        return 1
    (status,) = STATUS.unpack(answer)
    if status < 0:
        if -status in (signal.SIGINT, signal.SIGPIPE):  # which Python handles and ignores
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _run(address: str, arguments: list[str]) -> bytes | None:
    """What the server says of the end of the process; None where it has not begun one."""
    command = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    text = json.dumps(command).encode()
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address)
            socket.send_fds(server, [LENGTH.pack(len(text))], [0, 1, 2])
            server.sendall(text)
            if server.recv(len(BEGUN)) != BEGUN:
                return None
        except OSError:
            return None
        try:
            return server.recv(STATUS.size, socket.MSG_WAITALL)
        except OSError:
            return b""


if __name__ == "__main__":
    sys.exit(main())
