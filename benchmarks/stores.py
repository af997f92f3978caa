"""Measures how much network traffic a run saves if each host stores the groups of its own workers.

Run as root with ``python -m benchmarks.stores``. There are two hosts, each with its own network namespace. A link with
a limited rate connects the hosts. The first host has the buffer's ledger (the states of all groups) and a worker. The
second host has a worker and a learner rank. Each worker sends groups to the buffer as fast as it can. The rank fetches
each batch and ends the step. In one run, the first host stores all groups. In a second run, each host stores the groups
of its worker. The benchmark compares the bytes on the link.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.core.types import Prompt
from benchmarks.buffer import group_of
from benchmarks.report import Target, print_report
from buffer import (
    BufferClient,
    BufferConfig,
    BufferRole,
    ControlClient,
    LearnerClient,
    StoresOn,
    WorkerClient,
    client_keys,
    make_keys,
)
from buffer.server import BufferServer, StoreServer

ADDRESSES = ("10.78.0.1", "10.78.0.2")
GROUPS_PER_STEP = 16
MAX_LAG = 1
WARM_UP_STEPS = 2
_MB = 1e6


class HostProcess:
    """A simulated host: a process with its own network namespace. `run` starts more processes in this namespace.

    The process ends when the benchmark's process ends.
    """

    def __init__(self) -> None:
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", "echo up; exec sleep infinity"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "up\n":
            sys.exit("network namespaces are not permitted here; run this benchmark as root on your own machine")

    def run(self, *command: str, check: bool = True) -> None:
        """Run a command in the host's network namespace. If ``check`` is true, a failure raises an error."""
        subprocess.run(self.inside(command), check=check, stderr=None if check else subprocess.DEVNULL)

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs ``command`` in the host's network namespace."""
        return ["nsenter", "--target", str(self.process.pid), "--net", "--", *command]


@contextmanager
def two_hosts(rate: str) -> Iterator[list[HostProcess]]:
    """Yield two hosts with a network link between them, and stop the hosts at the end of the context.

    ``rate`` is the rate of the link in each direction, in the notation of ``tc``.
    """
    hosts = [HostProcess() for _ in ADDRESSES]
    try:
        first, second = (str(host.process.pid) for host in hosts)
        link = ["ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second]
        subprocess.run(link, check=True)
        for host, address in zip(hosts, ADDRESSES, strict=True):
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
            shaped = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "1mb"]
            host.run(*shaped, "latency", "100ms", check=False)
        yield hosts
    finally:
        for host in hosts:
            host.process.kill()
            host.process.wait()


class Host:
    """The process of one of the two hosts.

    ``number`` is 0 or 1. ``keys`` is the directory with the keys that encrypt the buffer's connections.
    """

    def __init__(self, number: int, *, keys: Path, stores_on: StoresOn, num_bytes: int) -> None:
        self._number = number
        self._keys = keys
        self._num_bytes = num_bytes
        self._config = BufferConfig(
            host=ADDRESSES[number], keys=str(keys), epoch="benchmark", stores_on=stores_on, max_lag=MAX_LAG
        )

    def client(self, address: str, role: BufferRole) -> BufferClient:
        """Return a new client of the buffer server at ``address``, with the keys of the component ``role``."""
        return BufferClient(address, keys=client_keys(self._keys, role), epoch="benchmark", host=str(self._number))

    async def join(self, address: str) -> None:
        """If each host stores its own groups, start a store on this host, and register the store with the buffer."""
        if self._config.stores_on is StoresOn.hosts:
            store = StoreServer(self._config, number=self._number)
            await ControlClient(self.client(address, BufferRole.controller)).add_store(store.address, str(self._number))

    async def work(self, address: str) -> None:
        """Send one finished group after another to the buffer. The task runs until it is cancelled."""
        client = self.client(address, BufferRole.rollout)
        worker, ledger = WorkerClient(client), ControlClient(client)
        version = 0
        while True:
            for lease in await worker.lease(version, GROUPS_PER_STEP // 2):
                await worker.put(group_of(lease, self._num_bytes))
            version = (await ledger.stats()).learner_version

    async def serve(self) -> None:
        """Run the first host, with the buffer server and a worker, until this process is killed."""
        server = BufferServer(self._config, groups_per_step=GROUPS_PER_STEP)
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        await self.join(server.address)
        await self.work(server.address)

    async def learn(self, address: str, num_steps: int) -> dict[str, float]:
        """Run the second host, with a worker and the learner rank, for ``num_steps`` steps after the warm-up.

        Return three means per step by name: the seconds, the bytes over the link, and the bytes of the fetched groups.
        """
        await self.join(address)
        control = ControlClient(self.client(address, BufferRole.controller))
        rank = LearnerClient(self.client(address, BufferRole.learner))
        working = asyncio.create_task(self.work(address))
        began_s, began_bytes, num_payload_bytes = 0.0, 0, 0
        for version in range(WARM_UP_STEPS + num_steps):
            if version == WARM_UP_STEPS:
                began_s, began_bytes = time.monotonic(), link_bytes()
            first = (MAX_LAG + 1) * GROUPS_PER_STEP * (version > 0) + GROUPS_PER_STEP * max(0, version - 1)
            number = GROUPS_PER_STEP * (1 if version else MAX_LAG + 1)
            await control.enqueue([_prompt(group_id) for group_id in range(first, first + number)])
            plan = await control.plan(version)
            groups = await rank.fetch([group.group_id for group in plan.groups])
            num_payload_bytes += sum(_size_of(group) for group in groups) * (version >= WARM_UP_STEPS)
            await control.commit(version)
        took_s, crossed = time.monotonic() - began_s, link_bytes() - began_bytes
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return {
            "step_s": took_s / num_steps,
            "link_bytes": crossed / num_steps,
            "payload_bytes": num_payload_bytes / num_steps,
        }


def _prompt(group_id: int) -> Prompt:
    return Prompt(group_id=group_id, prompt_ids=np.arange(100, dtype=np.int32), ground_truth="x")


def _size_of(group: Any) -> int:
    columns = (group.token_columns, group.trajectory_columns, group.turn_columns)
    return sum(column.nbytes for scope in columns for column in scope.values())


def link_bytes() -> int:
    """Return how many bytes this host has received and sent over the link so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    numbers = next(line for line in lines if line.strip().startswith("eth0:")).partition(":")[2].split()
    return int(numbers[0]) + int(numbers[8])


def measure(options: argparse.Namespace, stores_on: StoresOn) -> dict[str, float]:
    """Make one run on two new hosts, and return the figures that `Host.learn` has measured.

    ``stores_on`` says where groups are stored.
    """
    command = [sys.executable, "-m", "benchmarks.stores", "--stores-on", stores_on]
    command += ["--mb", str(options.mb), "--steps", str(options.steps)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_keys(folder / "keys")
        command += ["--keys", str(folder / "keys")]
        first, second = stack.enter_context(two_hosts(options.rate))
        serving = subprocess.Popen(first.inside([*command, "--host", "0"]), stdout=subprocess.PIPE, text=True)
        stack.callback(serving.wait)
        stack.callback(serving.kill)
        assert serving.stdout is not None
        address = serving.stdout.readline().strip()
        learning = second.inside([*command, "--host", "1", "--address", address])
        found = subprocess.run(learning, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    return json.loads(found.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Make both runs, and print the report. Return 0 if the target is met, else 1.

    If ``--host`` is given, this process only runs one of the hosts.
    """
    options = _parser().parse_args(arguments)
    if options.host is not None:
        host = Host(options.host, keys=options.keys, stores_on=options.stores_on, num_bytes=int(options.mb * _MB))
        work = host.learn(options.address, options.steps) if options.host else host.serve()
        sys.stdout.write(json.dumps(asyncio.run(work)) + "\n")
        return 0
    if os.geteuid():
        sys.exit("the hosts are network namespaces, which need root; run this benchmark as root")
    ledger, hosts = measure(options, StoresOn.ledger), measure(options, StoresOn.hosts)
    rows = {"beside the ledger": _in_words(ledger), "on their hosts": _in_words(hosts)}
    figures = {
        "link_bytes_per_step": hosts["link_bytes"],
        "link_bytes_vs_ledger": hosts["link_bytes"] / ledger["link_bytes"],
        "link_bytes_vs_payload": hosts["link_bytes"] / hosts["payload_bytes"],
        "step_s_vs_ledger": hosts["step_s"] / ledger["step_s"],
    }
    title = f"{GROUPS_PER_STEP} groups of {options.mb:g} MB per step from two hosts, a link of {options.rate}"
    targets = {"link_bytes_vs_ledger": Target(at_most=0.4)}
    return 0 if print_report(title, rows, figures, targets, baseline="all groups on the ledger's host") else 1


def _in_words(run: Mapping[str, float]) -> str:
    share = run["link_bytes"] / run["payload_bytes"]
    return f"{run['link_bytes'] / _MB:.1f} MB over the link per step, {share:.2f} of the payload; {run['step_s']:.2f} s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores", description=__doc__)
    parser.add_argument("--mb", type=float, default=2.0, help="size of a group")
    parser.add_argument("--steps", type=int, default=8, help="number of measured learner steps")
    parser.add_argument("--rate", default="1gbit", help="rate of the link, in tc's notation")
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stores-on", type=StoresOn, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
