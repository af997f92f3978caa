"""Every listening socket of a run is in docs/guarantees.md. Other users of the host cannot use these sockets."""

import ipaddress
import re
import socket
from contextlib import suppress

import psutil
import pytest

from tests.support.stranger import as_stranger, refusals
from tests.support.training_run import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

UNIX, ABSTRACT, LOOPBACK, HOST, ANY = "unix", "abstract", "loopback", "host", "any"
STEPS = 400


def rows():
    """Return the rows of the table of sockets in docs/guarantees.md.

    Each row is a pair: words of a command line, and the kind of address on which the process listens.
    """
    page = (ROOT / "docs" / "guarantees.md").read_text()
    section = page.partition("## Sockets of a run on one host")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ") and "`" in line]
    return {(re.findall(r"`(.+?)`", row[1])[0], re.findall(r"`(.+?)`", row[2])[0]) for row in cells}


def listening(pid):
    """Return a tuple for each reachable socket of a run: command line, kind of address, and port or path."""
    found = set()
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.Error):
            words = " ".join(process.cmdline()) or process.name()
            for each in process.net_connections("all"):
                if each.status == psutil.CONN_LISTEN:
                    found.add((words, kind_of(each.laddr.ip), each.laddr.port))
                elif each.family == socket.AF_UNIX and each.laddr:
                    found.add((words, ABSTRACT if each.laddr.startswith("@") else UNIX, each.laddr))
    return found


def kind_of(address):
    """Return the kind of an IP address: LOOPBACK, ANY or HOST."""
    found = ipaddress.ip_address(address)
    return LOOPBACK if found.is_loopback else ANY if found.is_unspecified else HOST


def row_of(words, where, known):
    """Return the row of the table ``known`` that describes a socket, or None."""
    return next((row for row in sorted(known, reverse=True) if row[0] in words and row[1] == where), None)


def answers_of(ports):
    """Send a request without a key to each HTTP port, and return the status of each answer.

    Another user runs this function, so it imports only the standard library.
    """
    found = {}
    for port in ports:
        with socket.socket() as end:
            end.settimeout(10.0)
            end.connect(("127.0.0.1", port))
            end.sendall(b"GET /model_info HTTP/1.0\r\n\r\n")
            found[port] = int(end.recv(4096).split()[1])
    return found


def test_a_run_listens_only_on_documented_sockets_and_refuses_other_users(start):
    run = start(f"total_steps={STEPS}", "learner.num_ranks=2", "placement.oversubscribe=true")
    run.wait_for_line("step 1/")
    sockets = listening(run.process.pid)
    known = rows()
    unknown = sorted(found for found in sockets if row_of(*found[:2], known) is None)
    assert not unknown, unknown
    unused = known - {row_of(words, where, known) for words, where, _ in sockets}
    assert not unused, unused
    paths = [place for _, where, place in sockets if where in (UNIX, ABSTRACT)]
    assert [path for path in paths if "/sockets/buffer" in path]
    assert not [path for path, error in as_stranger(lambda: refusals(paths)).items() if not error]
    ports = [place for words, where, place in sockets if where == LOOPBACK and "sglang.launch_server" in words]
    assert set(as_stranger(lambda: answers_of(ports)).values()) == {401}
