"""Versions that are sent over the network. A host receives each version once for all its engines."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.core.errors import WeightsError
from asyncrl.core.types import Carrier
from asyncrl.weights import received
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.manifest import read_manifest
from asyncrl.weights.staging import WeightStager
from asyncrl.weights.stream import WeightGroup, WeightSender
from tests.support.peers import peers
from tests.support.published_bytes import bytes_of, changed, publish_bytes, random_bytes
from tests.support.training_run import ROOT


class Network:
    """A learner of one rank that sends its versions over the network.

    With ``publish(deltas=True)``, three of four versions can also be sent as a delta.

    Attributes:
        images: The bytes of each version.
        rounds: A tuple for each round (one transfer of a version): version, receivers, whether a delta was sent.
        num_received: Number of bytes that receivers in this process got from the network.
    """

    def __init__(self, folder, *, num_receivers=1, num_held=3, timeout_s=10.0, num_values=90_000):
        self.folder, self.num_values, self.num_received = folder, num_values, 0
        self.images, self.offers, self.rounds = [], [], []
        options = PublishOptions(
            carrier=Carrier.host_stream, num_receivers=num_receivers, timeout_s=timeout_s, num_held=num_held
        )
        self.sender = WeightSender(options, rank=0, num_ranks=1)
        send = self.sender.send_round

        def noted(this):
            self.rounds.append((this.version, this.num_receivers, this.is_delta))
            return send(this)

        self.sender.send_round = noted

    def publish(self, *, deltas=False):
        version = len(self.offers)
        image = changed(self.images[-1], seed=version) if version else random_bytes(self.num_values)
        base = (self.offers[-1], self.images[-1]) if deltas and version % 4 else None
        offer = publish_bytes(self.folder, version, image, base=base, num_files=1)
        manifest, delta = read_manifest(offer), None
        if manifest.delta is not None:
            content = Path(manifest.directory, *manifest.delta.files).read_bytes()
            delta = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.images.append(image)
        self.offers.append(offer)
        self.sender.hold(version, torch.from_numpy(image), manifest.pieces, delta)
        return self.sender.offer(offer, [len(manifest.pieces)])


@pytest.fixture
def network(tmp_path, monkeypatch):
    learner = Network(tmp_path / "published")
    receive = WeightGroup.receive

    def counted(self, data, source, deadline):
        learner.num_received += data.numel()
        return receive(self, data, source, deadline)

    monkeypatch.setattr(WeightGroup, "receive", counted)
    yield learner
    learner.sender.close()


@pytest.fixture
def host(tmp_path):
    """Yield a function that makes a weight stager for each rollout worker of a host."""
    made = []

    def make(number=0, *, memory="memory", timeout_s=10.0):
        made.append(WeightStager(f"engine-{number}", memory=tmp_path / memory, copies=True, timeout_s=timeout_s))
        return made[-1]

    yield make
    for stager in made:
        stager.close()


def num_copies(folder):
    """Return the number of distinct data files in a folder."""
    return len({path.stat().st_ino for path in folder.rglob("*.safetensors")})


async def staged_together(stack, stagers, offer):
    return await asyncio.gather(*(stack.enter_async_context(stager.staged(offer)) for stager in stagers))


async def test_four_engines_of_a_host_receive_and_store_each_version_once(network, host, tmp_path):
    stagers = [host(number) for number in range(4)]
    for version in range(3):
        offer = network.publish()
        async with AsyncExitStack() as stack:
            for local in await staged_together(stack, stagers, offer):
                assert (local.kind, local.carrier) == ("full", Carrier.folder)
                assert np.array_equal(bytes_of(local), network.images[version])
            assert num_copies(tmp_path / "memory") == 1
    assert network.rounds == [(version, 1, False) for version in range(3)]
    published = sum(piece.num_bytes for offer in network.offers for piece in read_manifest(offer).pieces)
    assert network.num_received == published


async def test_two_hosts_with_two_engines_each_receive_one_copy_per_host(tmp_path, monkeypatch, host):
    learner, counts = Network(tmp_path / "published", num_receivers=2), []
    receive = WeightGroup.receive

    def counted(self, data, source, deadline):
        counts.append(data.numel())
        return receive(self, data, source, deadline)

    monkeypatch.setattr(WeightGroup, "receive", counted)
    try:
        offer = learner.publish()
        stagers = [host(number, memory=f"memory-{number // 2}") for number in range(4)]
        async with AsyncExitStack() as stack:
            for local in await staged_together(stack, stagers, offer):
                assert np.array_equal(bytes_of(local), learner.images[0])
            assert [num_copies(tmp_path / f"memory-{number}") for number in range(2)] == [1, 1]
        assert learner.rounds == [(0, 2, False)]
        assert sum(counts) == 2 * sum(piece.num_bytes for piece in read_manifest(learner.offers[0]).pieces)
    finally:
        learner.sender.close()


def print_bytes_on_the_network(folder):
    """Publish two versions of 4 MB each to two hosts with two engines each.

    For each version, print the bytes that went over loopback per host and per published byte.
    """
    learner = Network(folder / "published", num_receivers=2, num_values=2_000_000)
    stagers = [
        WeightStager(f"engine-{number}", memory=folder / f"memory-{number // 2}", copies=False, timeout_s=30.0)
        for number in range(4)
    ]

    def bytes_so_far():
        (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line]
        return int(line.partition(":")[2].split()[0])

    async def stage_all(offer):
        async with AsyncExitStack() as stack:
            for local in await staged_together(stack, stagers, offer):
                assert np.array_equal(bytes_of(local), learner.images[-1])

    for _ in range(2):
        offer = learner.publish()
        began = bytes_so_far()
        asyncio.run(stage_all(offer))
        sys.stdout.write(f"{(bytes_so_far() - began) / 2 / len(learner.images[-1])}\n")
    for closed in (*stagers, learner.sender):
        closed.close()


def test_the_kernel_counts_one_copy_per_host_on_the_network(tmp_path):
    code = f"from pathlib import Path; from {__name__} import *; print_bytes_on_the_network(Path({str(tmp_path)!r}))"
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    done = subprocess.run([*alone, sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=50)
    assert done.returncode == 0, done.stderr
    shares = [float(line) for line in done.stdout.split()]
    assert len(shares) == 2
    assert all(1.0 <= share <= 1.05 for share in shares), shares


async def test_a_late_engine_finds_the_newest_version_on_its_host(network, host):
    offer = network.publish()
    async with host(0).staged(offer):
        pass
    async with host(1).staged(offer) as local:
        assert np.array_equal(bytes_of(local), network.images[0])
    assert len(network.rounds) == 1


async def test_the_next_version_does_not_replace_a_version_that_an_engine_still_loads(network, host, tmp_path):
    first, second = host(0), host(1)
    async with first.staged(network.publish()) as old, second.staged(network.publish()) as new:
        assert np.array_equal(bytes_of(old), network.images[0])
        assert np.array_equal(bytes_of(new), network.images[1])
    assert num_copies(tmp_path / "memory") == 1


async def test_a_host_can_receive_an_older_version_in_addition_to_the_newest(network, host):
    pinned = network.publish()
    newest = network.publish()
    async with host(0).staged(newest), host(1).staged(pinned) as local:
        assert np.array_equal(bytes_of(local), network.images[0])
    async with host(2).staged(newest) as local:
        assert np.array_equal(bytes_of(local), network.images[1])
    assert [version for version, *_ in network.rounds] == [1, 0]


@pytest.mark.parametrize("is_in_use", [False, True], ids=["in-place", "in-use"])
async def test_each_host_applies_a_delta_once_and_never_to_a_file_that_an_engine_loads(network, host, is_in_use):
    stagers = [host(number) for number in range(3)]
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(stagers[2].staged(network.publish(deltas=True)))
        if not is_in_use:
            await stack.aclose()
        inode = _inode_of(old) if is_in_use else None
        for version in (1, 2, 3):
            offer = network.publish(deltas=True)
            async with AsyncExitStack() as both:
                for local in await staged_together(both, stagers[:2], offer):
                    assert np.array_equal(bytes_of(local), network.images[version])
                    assert _inode_of(local) != inode
        if is_in_use:
            assert np.array_equal(bytes_of(old), network.images[0])
    assert network.rounds == [(0, 1, False), (1, 1, True), (2, 1, True), (3, 1, True)]


def _inode_of(local):
    manifest = read_manifest(local)
    return Path(manifest.directory, manifest.files[0]).stat().st_ino


def spoil_and_read(local):
    Path(read_manifest(local).directory, "model.safetensors").write_bytes(bytes(200_000))
    bytes_of(local)


async def test_a_version_that_an_engine_could_not_load_is_received_again(network, host):
    offer = network.publish()
    with pytest.raises(WeightsError, match="1 of 1 tensors differ, first w"):
        async with host(0).staged(offer) as local:
            spoil_and_read(local)
    async with host(1).staged(offer) as local:
        assert np.array_equal(bytes_of(local), network.images[0])
    assert len(network.rounds) == 2


async def test_versions_of_an_earlier_learner_are_not_used(network, host, tmp_path):
    async with host(0).staged(network.publish()):
        pass
    other = Network(tmp_path / "published-again")
    try:
        offer = other.publish()
        offer = other.publish()
        async with host(0).staged(offer) as local:
            assert np.array_equal(bytes_of(local), other.images[1])
        assert num_copies(tmp_path / "memory") == 1
    finally:
        other.sender.close()


async def test_the_last_engine_of_a_host_removes_the_received_files(network, host, tmp_path):
    first, second = host(0), host(1)
    offer = network.publish()
    for stager in (first, second):
        async with stager.staged(offer):
            pass
    first.close()
    assert num_copies(tmp_path / "memory") == 1
    second.close()
    assert list((tmp_path / "memory").iterdir()) == []
    async with first.staged(offer) as local:  # the stager creates the folder again
        assert np.array_equal(bytes_of(local), network.images[0])


async def test_an_engine_receives_without_the_lock_if_another_engine_does_not_release_it(
    network, host, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(received, "load_limit_s", lambda timeout_s, num_bytes: 0.3)
    stopped, stager = host(0), host(1)
    offer = network.publish()
    async with stopped.received.version(offer):
        with caplog.at_level(logging.WARNING):
            async with stager.staged(offer) as local:
                assert np.array_equal(bytes_of(local), network.images[0])
        assert "engine-1 receives policy version 0 into a separate folder" in caplog.text
    async with stager.staged(network.publish()) as local:
        assert np.array_equal(bytes_of(local), network.images[1])
    assert {path.name for path in (tmp_path / "memory").iterdir()} == {"received"}
    assert threading.active_count() < 20


async def test_after_a_cancelled_wait_another_engine_gets_the_lock(network, host):
    offer = network.publish()
    async with host(0).received.version(offer):
        waiting = asyncio.create_task(host(1).staged(offer).__aenter__())
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with host(2).staged(offer) as local:
        assert np.array_equal(bytes_of(local), network.images[0])


# Tests in which each rollout worker is a separate process


def stage(state, offer, memory, number, timeout_s):
    """Stage a version as a rollout worker does, and return the bytes of the version. The stager stays open."""
    state["stager"] = WeightStager(f"engine-{number}", memory=Path(memory), copies=False, timeout_s=timeout_s)

    async def staged():
        async with state["stager"].staged(offer) as local:
            return bytes_of(local)

    return asyncio.run(staged())


def die_in_a_transfer(state):
    WeightGroup.receive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def close(state):
    state["stager"].close()


@pytest.mark.long
def test_if_the_receiver_of_a_host_dies_in_a_round_the_next_engine_receives(tmp_path):
    learner = Network(tmp_path / "published", timeout_s=5.0)
    try:
        offer = learner.publish()
        with peers(3) as workers:
            workers[0].ask(die_in_a_transfer).answer()
            for number, worker in enumerate(workers):
                worker.ask(stage, offer, str(tmp_path / "memory"), number, 5.0)
                if number == 0:
                    worker.wait_end(30.0)
            for worker in workers[1:]:
                assert np.array_equal(worker.answer(), learner.images[0])
            assert [num_receivers for _, num_receivers, _ in learner.rounds] == [1, 1]
            assert num_copies(tmp_path / "memory") == 1
            for worker in workers[1:]:
                worker.ask(close).answer()
        assert list((tmp_path / "memory").iterdir()) == []
    finally:
        learner.sender.close()


def test_if_the_receiver_dies_one_of_the_waiting_engines_receives(tmp_path):
    learner = Network(tmp_path / "published", timeout_s=5.0)
    try:
        offer = learner.publish()
        with peers(3) as workers:
            for worker in workers:
                worker.ask(stop_in_a_transfer, str(tmp_path / "memory")).answer()
            for number, worker in enumerate(workers):
                worker.ask(stage, offer, str(tmp_path / "memory"), number, 5.0)
            first = int(_wait_for(tmp_path / "memory" / "receiver"))
            (receiver,) = [worker for worker in workers if worker.pid == first]
            (tmp_path / "memory" / "receiver").unlink()
            receiver.signal(signal.SIGKILL)
            second = int(_wait_for(tmp_path / "memory" / "receiver"))
            assert second != first
            (tmp_path / "memory" / "go").touch()
            for worker in workers:
                if worker is not receiver:
                    assert np.array_equal(worker.answer(), learner.images[0])
    finally:
        learner.sender.close()


def stop_in_a_transfer(state, memory):
    """Pause each transfer: write this process's id to a file, then wait until the file ``go`` exists."""
    receive = WeightGroup.receive

    def waiting(self, data, source, deadline):
        Path(memory, ".receiver").write_text(str(os.getpid()))
        Path(memory, ".receiver").replace(Path(memory, "receiver"))
        _wait_for(Path(memory, "go"))
        return receive(self, data, source, deadline)

    WeightGroup.receive = waiting


def _wait_for(path):
    for _ in range(3000):
        if path.exists():
            return path.read_text()
        threading.Event().wait(0.01)
    raise TimeoutError(path)
