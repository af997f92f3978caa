"""A port for a ZMQ socket, on which connections beyond the limit of open files are closed.

ZMQ's own thread would try to accept the first of them again and again, and take a core for it.
"""

import asyncio
import ctypes
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from .sockets import Channel

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_SIOCGIFADDR = 0x8915
_CLONE_FILES = 0x400


class PortListener:
    """Binds a ZMQ socket to a port; made on a running loop, and closed before the ZMQ socket.

    ``on_refused`` is called for each connection that is closed because this process may open no more files. Raises
    `OSError` if the port cannot be bound.

    Attributes:
        address: Where the socket listens.
    """

    def __init__(self, bound: zmq.Socket[Any], host: str, port: int, on_refused: Callable[[], None]) -> None:
        own_host = _address_of(host)
        family = socket.AF_INET6 if ":" in own_host else socket.AF_INET
        self._listener = socket.create_server((own_host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)  # for ZMQ too, which may find that a connection was taken here
        self._bound = bound
        name = f"[{own_host}]" if family == socket.AF_INET6 else own_host
        self.address = f"tcp://{name}:{self._listener.getsockname()[1]}"
        self._refusals = _Refusals(self._listener.fileno(), self.address, on_refused)
        bound.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
        monitor = bound.get_monitor_socket(zmq.EVENT_ACCEPT_FAILED)
        bound.bind(self.address)
        self._monitor = Channel(monitor, lambda event: self._refusals.wanted.set())

    def close(self) -> None:
        """Stop listening."""
        self._bound.disable_monitor()
        self._monitor.close()
        self._refusals.close()
        self._listener.close()


class _Refusals(threading.Thread):
    """Accepts and closes the connections that wait, each time that they are ``wanted`` to be refused.

    The thread has a table of files of its own, with the listening socket alone. So it can accept a connection while
    the process can open no more files, and ZMQ cannot take the file that it uses.
    """

    def __init__(self, listening: int, address: str, on_refused: Callable[[], None]) -> None:
        super().__init__(name=f"refusals {address}", daemon=True)
        self._listening, self._address = listening, address
        self._loop, self._on_refused = asyncio.get_running_loop(), on_refused
        self._is_alone, self._is_closed, self._has_refused = threading.Event(), False, False
        self.wanted = threading.Event()
        self.start()
        self._is_alone.wait()

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self.wanted.set()
        self.join()

    def run(self) -> None:
        """Wait until connections are to be refused, again and again."""
        libc = ctypes.CDLL(None, use_errno=True)
        is_alone = libc.unshare(_CLONE_FILES) == 0
        if is_alone:
            os.closerange(3, self._listening)
            os.closerange(self._listening + 1, os.sysconf("SC_OPEN_MAX"))
        self._is_alone.set()
        if not is_alone:
            logger.warning("%s: connections beyond the limit of open files will cost a core", self._address)
            return
        with socket.socket(fileno=self._listening) as listener:
            while self.wanted.wait() and not self._is_closed:
                self.wanted.clear()
                with suppress(OSError):  # none waits
                    while True:
                        listener.accept()[0].close()
                        self._loop.call_soon_threadsafe(self._note)

    def _note(self) -> None:
        self._on_refused()
        if not self._has_refused:
            self._has_refused = True
            logger.warning("%s closes connections: this process may open no more files", self._address)


def _address_of(host: str) -> str:
    """The address to bind: ``host`` itself, that of the interface of this name, or every address."""
    if host == "*":
        return "0.0.0.0"
    name = "127.0.0.1" if host == "localhost" else host.strip("[]")
    with suppress(ValueError):
        return str(ipaddress.ip_address(name))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])
