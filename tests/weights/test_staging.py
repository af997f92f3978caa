"""Staging of offered versions on an engine's host, while engines generate and the learner removes versions."""

import asyncio
import errno
import logging
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.core.errors import DeadlineError, WeightsError, WeightsGone
from asyncrl.core.types import FROZEN, Carrier
from asyncrl.weights import staging
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.manifest import read_manifest
from asyncrl.weights.staging import WeightStager
from asyncrl.weights.stream import WeightSender
from tests.support.published_bytes import bytes_of, changed, publish_bytes, random_bytes

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def make_stager(tmp_path):
    """Yield a function that makes stagers. All stagers use the same folder. The fixture closes the stagers."""
    made = []

    def make(name="engine-0", *, copies=False, timeout_s=10.0):
        made.append(WeightStager(name, memory=tmp_path / "memory", copies=copies, timeout_s=timeout_s))
        return made[-1]

    yield make
    for stager in made:
        stager.close()


class Learner:
    """Publishes random bytes. Every fourth version is full, and all other versions are deltas."""

    def __init__(self, folder):
        self.folder = folder
        self.images = []
        self.offers = []

    def publish(self):
        version = len(self.offers)
        image = changed(self.images[-1], seed=version) if version else random_bytes(30_000)
        base = (self.offers[-1], self.images[-1]) if version % 4 else None
        self.offers.append(publish_bytes(self.folder, version, image, base=base))
        self.images.append(image)
        return self.offers[-1]

    def remove(self, version):
        shutil.rmtree(self.folder / f"v{version:08d}")


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path / "published")


@pytest.mark.parametrize("copies", [False, True], ids=["linked", "copied"])
async def test_a_staged_version_loads_after_the_learner_has_removed_it(copies, make_stager, learner):
    stager = make_stager(copies=copies)
    async with stager.staged(learner.publish()) as local:
        learner.remove(0)
        assert (local.kind, local.version) == ("full", 0)
        assert np.array_equal(bytes_of(local), learner.images[0])
    assert not list(learner.folder.rglob("v*"))


async def test_a_failed_load_leaves_no_link(make_stager, learner):
    stager = make_stager()
    with pytest.raises(ZeroDivisionError):
        async with stager.staged(learner.publish()):
            raise ZeroDivisionError
    stager.close()
    assert [path.name for path in learner.folder.iterdir()] == ["v00000000"]


async def test_staged_files_of_an_earlier_engine_with_the_same_name_are_replaced(make_stager, learner):
    offer = learner.publish()
    make_stager().stage(offer)  # the first engine is killed and removes no file
    async with make_stager().staged(offer) as local:
        assert np.array_equal(bytes_of(local), learner.images[0])


async def test_a_version_that_cannot_be_linked_is_copied(make_stager, learner, monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    async with make_stager().staged(learner.publish()) as local:
        learner.remove(0)
        assert np.array_equal(bytes_of(local), learner.images[0])


async def test_each_delta_is_applied_to_the_image_of_the_version_before(make_stager, learner):
    stager = make_stager(copies=True)
    for version in range(12):
        async with stager.staged(learner.publish()) as local:
            assert np.array_equal(bytes_of(local), learner.images[version])
        if version % 4 == 0 and version:
            for old in range(version - 4, version):
                learner.remove(old)


@pytest.mark.parametrize("copies", [False, True], ids=["linked", "copied"])
async def test_a_late_engine_starts_from_the_last_full_version(copies, make_stager, learner):
    newest = [learner.publish() for _ in range(8)][-1]
    for old in range(4):
        learner.remove(old)
    async with make_stager(copies=copies).staged(newest) as local:
        assert np.array_equal(bytes_of(local), learner.images[7])


async def test_an_engine_that_skips_versions_applies_all_deltas_between_them(make_stager, learner):
    stager = make_stager(copies=True)
    async with stager.staged(learner.publish()):
        pass
    os.remove(learner.folder / "v00000000" / "model.safetensors")  # staging must work without this file
    newest = [learner.publish() for _ in range(3)][-1]
    async with stager.staged(newest) as local:
        assert np.array_equal(bytes_of(local), learner.images[3])


async def test_a_removed_version_raises_weights_gone_and_the_newest_is_staged_next(make_stager, learner):
    stager = make_stager(copies=True)
    learner.publish()
    delta = learner.publish()
    learner.remove(0)
    with pytest.raises(WeightsGone, match=r"policy version 1 was removed before engine-0 staged it: .*v00000000"):
        async with stager.staged(delta):
            pass
    full = [learner.publish() for _ in range(3)][-1]
    async with stager.staged(full) as local:
        assert np.array_equal(bytes_of(local), learner.images[4])


async def test_a_damaged_image_is_replaced_from_the_last_full_version(make_stager, learner, tmp_path, caplog):
    stager = make_stager(copies=True)
    async with stager.staged(learner.publish()):
        pass
    with (tmp_path / "memory" / "engine-0" / "model.safetensors").open("r+b") as image:
        image.write(bytes(20_000))
    with caplog.at_level(logging.WARNING):
        async with stager.staged(learner.publish()) as local:
            assert np.array_equal(bytes_of(local), learner.images[1])
    assert "delta-0.bin does not turn policy version 0" in caplog.text


async def test_a_damaged_delta_raises_an_error_until_the_next_full_version(make_stager, learner):
    stager = make_stager(copies=True)
    learner.publish()
    delta = learner.publish()
    (learner.folder / "v00000001" / "delta-0.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"v00000001/delta-0.bin does not turn policy version 0 into"):
        async with stager.staged(delta):
            pass
    full = [learner.publish() for _ in range(3)][-1]
    async with stager.staged(full) as local:
        assert np.array_equal(bytes_of(local), learner.images[4])


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["late", "cancelled"])
async def test_an_abandoned_staging_thread_writes_nothing_into_the_next_image(
    make_stager, learner, monkeypatch, tmp_path, is_cancelled
):
    stager = make_stager(copies=True, timeout_s=0.3)
    first, goes_on, has_ended = learner.publish(), threading.Event(), threading.Event()
    copied = shutil.copyfileobj

    def copy_slowly_once(source, target, length):
        monkeypatch.setattr(shutil, "copyfileobj", copied)
        goes_on.wait(10)
        copied(source, target, length)
        has_ended.set()

    monkeypatch.setattr(shutil, "copyfileobj", copy_slowly_once)
    staging = asyncio.ensure_future(stager.staged(first).__aenter__())
    await asyncio.sleep(0.1)
    if is_cancelled:
        staging.cancel()
    with pytest.raises((DeadlineError, asyncio.CancelledError)):
        await staging
    async with stager.staged(learner.publish()) as local:
        goes_on.set()
        await asyncio.to_thread(has_ended.wait, 10)
        await asyncio.sleep(0.1)
        assert np.array_equal(bytes_of(local), learner.images[1])
        assert len(list((tmp_path / "memory").iterdir())) == 1, "the thread must remove what it wrote"
    async with stager.staged(learner.publish()) as local:
        assert np.array_equal(bytes_of(local), learner.images[2])
    stager.close()
    assert not list((tmp_path / "memory").iterdir())


async def test_the_error_for_a_full_disk_at_the_image_names_the_options(make_stager, learner, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(staging.shutil, "copyfileobj", full)
    with pytest.raises(WeightsError, match=r"no room for 60000 bytes .*engine-0.*No space left.*weights.full_every=1"):
        async with make_stager(copies=True).staged(learner.publish()):
            pass


async def test_the_error_for_a_full_disk_at_the_manifest_names_the_folder(make_stager, learner, monkeypatch):
    monkeypatch.setattr(staging, "open_private", lambda *_: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(WeightsError, match=r"no room for \d+ bytes of weights in .*engine-0.*No space left"):
        async with make_stager(copies=True).staged(learner.publish()):
            pass


async def test_staging_from_a_folder_that_does_not_respond_raises_a_deadline_error(make_stager, learner, tmp_path):
    offer = learner.publish()
    manifest = learner.folder / "v00000000" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    stager = make_stager(timeout_s=0.2)
    with pytest.raises(DeadlineError, match=r"engine-0 did not stage policy version 0 .*rollout_fleet.load_timeout_s"):
        async with stager.staged(offer):
            pass
    await asyncio.to_thread(manifest.write_bytes, b"")  # end the read that blocks the thread


async def test_a_closed_stager_leaves_no_files(make_stager, learner, tmp_path):
    stager = make_stager(copies=True)
    async with stager.staged(learner.publish()):
        pass
    stager.close()
    assert list((tmp_path / "memory").iterdir()) == []


async def test_a_version_of_a_host_stream_stays_in_host_memory_until_it_is_loaded(make_stager, learner, tmp_path):
    offer = learner.publish()
    pieces = read_manifest(offer).pieces
    options = PublishOptions(carrier=Carrier.host_stream, num_receivers=1, timeout_s=10.0, num_held=1)
    sender = WeightSender(options, rank=0, num_ranks=1)
    sender.hold(0, torch.from_numpy(learner.images[0]), pieces)
    try:
        sent = sender.offer(offer, [len(pieces)])
        stager = make_stager()
        async with stager.staged(sent) as local:
            learner.remove(0)
            assert Path(local.manifest).is_relative_to(tmp_path / "memory")
            assert np.array_equal(bytes_of(local), learner.images[0])
        with pytest.raises(WeightsGone, match="version 7 is no longer sent"):
            async with stager.staged(replace(sent, version=7)):
                pass
        stager.close()
    finally:
        sender.close()
    assert not [path for path in (tmp_path / "memory").rglob("*") if path.is_file()]


async def test_weights_outside_a_published_folder_are_staged_in_place(make_stager, learner, tmp_path):
    learner.publish()
    folder = learner.folder / "v00000000"
    offer = read_manifest(learner.offers[0]).offer(tmp_path / "manifest.json", 3)
    async with make_stager().staged(offer) as local:
        assert local == offer
        assert np.array_equal(bytes_of(local), learner.images[0])
    assert folder.is_dir()


class AdapterLearner(Learner):
    """Publishes random bytes as adapters of frozen weights."""

    def __init__(self, folder):
        super().__init__(folder)
        self.frozen_image = random_bytes(90_000, seed=77)
        self.frozen = publish_bytes(folder, FROZEN, self.frozen_image)

    def publish(self):
        version = len(self.offers)
        self.images.append(random_bytes(3_000, seed=version))
        self.offers.append(publish_bytes(self.folder, version, self.images[-1], frozen=self.frozen))
        return self.offers[-1]


def base_of(offer):
    """Return the offer of the frozen weights to which a staged adapter belongs."""
    return read_manifest(offer).base


@pytest.mark.parametrize("copies", [False, True], ids=["linked", "copied"])
async def test_a_staged_adapter_includes_the_frozen_weights_even_for_a_late_engine(copies, make_stager, tmp_path):
    learner = AdapterLearner(tmp_path / "published")
    for _ in range(3):
        offer = learner.publish()
    for old in range(2):
        learner.remove(old)
    stager = make_stager(copies=copies)
    for _ in range(2):
        async with stager.staged(offer) as local:
            learner.remove(offer.version)
            assert (local.kind, local.version) == ("adapter", offer.version)
            assert np.array_equal(bytes_of(local), learner.images[-1])
            assert np.array_equal(bytes_of(base_of(local)), learner.frozen_image)
        offer = learner.publish()


async def test_frozen_weights_are_copied_once_and_again_when_they_change(make_stager, tmp_path):
    learner = AdapterLearner(tmp_path / "published")
    stager = make_stager(copies=True)
    async with stager.staged(learner.publish()) as local:
        held = Path(base_of(local).manifest)
    (learner.folder / "frozen" / "model.safetensors").unlink()
    async with stager.staged(learner.publish()) as local:
        assert Path(base_of(local).manifest) == held
        assert np.array_equal(bytes_of(base_of(local)), learner.frozen_image)
    other = AdapterLearner(tmp_path / "restarted")
    other.frozen = publish_bytes(tmp_path / "others", FROZEN, random_bytes(90_000, seed=78))
    shutil.rmtree(other.folder)
    shutil.move(tmp_path / "others", other.folder)
    other.frozen = replace(other.frozen, manifest=str(other.folder / "frozen" / "manifest.json"))
    async with stager.staged(other.publish()) as local:
        assert np.array_equal(bytes_of(base_of(local)), random_bytes(90_000, seed=78))


async def test_a_stream_sends_the_frozen_weights_once_and_then_only_adapters(make_stager, tmp_path):
    learner = AdapterLearner(tmp_path / "published")
    options = PublishOptions(carrier=Carrier.host_stream, num_receivers=1, timeout_s=10.0, num_held=1)
    sender, stager = WeightSender(options, rank=0, num_ranks=1), make_stager()

    def send(offer, image):
        pieces = read_manifest(offer).pieces
        sender.hold(offer.version, torch.from_numpy(image), pieces)
        return sender.offer(offer, [len(pieces)])

    try:
        send(learner.frozen, learner.frozen_image)
        for version in range(3):
            offer = send(learner.publish(), learner.images[-1])
            sender.retire(version)
            async with stager.staged(offer) as local:
                assert np.array_equal(bytes_of(local), learner.images[version])
                assert np.array_equal(bytes_of(base_of(local)), learner.frozen_image)
            if version == 1:
                sender.held_parts.pop(FROZEN)
    finally:
        sender.close()


class NetworkLearner(Learner):
    """A learner of one rank that sends its versions over loopback. ``deltas_sent`` says which transfers were deltas."""

    def __init__(self, folder):
        super().__init__(folder)
        options = PublishOptions(carrier=Carrier.host_stream, num_receivers=1, timeout_s=10.0, num_held=2)
        self.sender = WeightSender(options, rank=0, num_ranks=1)
        self.deltas_sent, send = [], self.sender.send_round

        def noted(this):
            self.deltas_sent.append(this.is_delta)
            return send(this)

        self.sender.send_round = noted

    def publish(self):
        offer = super().publish()
        manifest = read_manifest(offer)
        delta = None
        if manifest.delta is not None:  # one rank sends one delta file, so join the two
            manifest = replace(
                manifest, delta=replace(manifest.delta, files=("delta.bin",), changes=self.joined(manifest))
            )
            offer = manifest.offer(Path(offer.manifest), offer.version)
            parts = [Path(manifest.directory, name).read_bytes() for name in ("delta-0.bin", "delta-1.bin")]
            delta = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
            self.offers[-1] = offer
        self.sender.hold(offer.version, torch.from_numpy(self.images[-1]), manifest.pieces, delta)
        return self.sender.offer(offer, [len(manifest.pieces)])

    @staticmethod
    def joined(manifest):
        first = Path(manifest.directory, "delta-0.bin").stat().st_size
        return tuple(replace(c, file=0, at=c.at + first * c.file) for c in manifest.delta.changes)


@pytest.fixture
def network(tmp_path):
    learner = NetworkLearner(tmp_path / "published")
    yield learner
    learner.sender.close()


async def test_a_stream_sends_only_the_delta_to_a_host_with_the_previous_version(make_stager, network):
    stager = make_stager(copies=True)
    for version in range(6):
        async with stager.staged(network.publish()) as local:
            assert np.array_equal(bytes_of(local), network.images[version])
    assert network.deltas_sent == [False, True, True, True, False, True]


async def test_a_stream_sends_a_full_version_to_a_host_without_the_previous_version(make_stager, network):
    stager = make_stager(copies=True)
    for version in range(4):
        offer = network.publish()
        if version != 2:
            async with stager.staged(offer) as local:
                assert np.array_equal(bytes_of(local), network.images[version])
    async with make_stager("engine-1", copies=True).staged(offer) as local:
        assert np.array_equal(bytes_of(local), network.images[3])
    assert network.deltas_sent == [False, True, False]  # engine-1 finds version 3 on its host


async def test_a_stream_replaces_a_damaged_image_by_the_full_version(make_stager, network, tmp_path, caplog):
    stager = make_stager(copies=True)
    async with stager.staged(network.publish()):
        pass
    with next((tmp_path / "memory" / "received").glob("*-00000000/model.safetensors")).open("r+b") as image:
        image.write(bytes(20_000))
    with caplog.at_level(logging.WARNING):
        async with stager.staged(network.publish()) as local:
            assert np.array_equal(bytes_of(local), network.images[1])
    assert network.deltas_sent == [False, True, False]
    assert "the host receives the full version instead" in caplog.text


def outside(tmp_path):
    """Make a folder outside of all published folders. Staging must not write into this folder."""
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", ["../outside/evil.pth", "/etc/passwd", "..", ""])
@pytest.mark.parametrize("copies", [False, True], ids=["linked", "copied"])
async def test_a_manifest_with_a_file_outside_its_folder_is_refused(name, copies, make_stager, learner, tmp_path):
    victim = outside(tmp_path)
    manifest = replace(read_manifest(learner.publish()), files=(name,))
    (learner.folder / "evil.pth").write_bytes(b"import os")
    offer = manifest.offer(learner.folder / "v00000000" / "manifest.json", 0)
    with pytest.raises(WeightsError, match=r"names the file .*, expected a name without a folder"):
        async with make_stager(copies=copies).staged(offer):
            pass
    assert not list(victim.iterdir())


async def test_staging_does_not_follow_a_link_in_the_folder_of_published_weights(make_stager, learner, tmp_path):
    victim = outside(tmp_path)
    offer = learner.publish()
    (learner.folder / staging.LINKS).symlink_to(victim)
    async with make_stager().staged(offer) as local:
        assert np.array_equal(bytes_of(local), learner.images[0])
        assert Path(local.manifest).is_relative_to(tmp_path / "memory")
    assert not list(victim.iterdir())


async def test_weights_are_not_linked_in_a_folder_that_other_users_can_write_to(make_stager, learner, tmp_path):
    offer = learner.publish()
    learner.folder.chmod(0o777)
    async with make_stager().staged(offer) as local:
        assert Path(local.manifest).is_relative_to(tmp_path / "memory")
    assert not list(learner.folder.glob(staging.LINKS))


async def test_weights_are_not_copied_to_a_folder_that_other_users_can_write_to(make_stager, learner, tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory").chmod(0o777)
    with pytest.raises(WeightsError, match=r"got a folder of user \d+ with mode 777"):
        async with make_stager(copies=True).staged(learner.publish()):
            pass


async def test_staging_refuses_a_memory_folder_that_is_a_link(make_stager, learner, tmp_path):
    victim = outside(tmp_path)
    (tmp_path / "memory").symlink_to(victim)
    with pytest.raises(WeightsError, match="may write to, got a link"):
        async with make_stager(copies=True).staged(learner.publish()):
            pass
    assert not list(victim.iterdir())


async def test_staging_does_not_write_a_data_file_through_a_link(make_stager, learner, tmp_path):
    victim = outside(tmp_path) / "file"
    victim.write_bytes(b"mine")
    offer = learner.publish()
    stager = make_stager(copies=True)
    image = tmp_path / "memory" / "engine-0"
    image.mkdir(parents=True, mode=0o700)
    image.parent.chmod(0o700)
    (image / read_manifest(offer).files[0]).symlink_to(victim)
    with pytest.raises(WeightsError):
        async with stager.staged(offer):
            pass
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("copies", [False, True], ids=["linked", "copied"])
async def test_other_users_cannot_open_staged_files(copies, make_stager, learner, tmp_path):
    async with make_stager(copies=copies).staged(learner.publish()) as local:
        folder = Path(local.manifest).parent
        while folder not in (learner.folder, tmp_path):
            assert folder.stat().st_mode & 0o077 == 0, folder
            folder = folder.parent
    image = tmp_path / "memory" / "engine-0"
    assert all(path.stat().st_mode & 0o077 == 0 for path in image.rglob("*"))
