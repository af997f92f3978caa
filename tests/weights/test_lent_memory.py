"""Versions that learner ranks lend in their own memory, and processes that read them."""

import os
import signal
import threading
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from asyncrl.core.errors import WeightsError, WeightsGone
from asyncrl.weights import assembly
from asyncrl.weights.assembly import DEVICE_DIGEST, device_digest, tensor_pieces
from asyncrl.weights.manifest import LentPart, Manifest, ReadLock, StoredTensor
from asyncrl.weights.memory import LentBuffer, LentWeights
from tests.support.peers import peers

CPU = torch.device("cpu")
TENSORS = [
    ("whole", "F32", (61, 1021)),
    ("shared", "F32", (30, 40)),
    ("half", "BF16", (1000, 7)),
    ("none", "I64", (0,)),
]
"""Name, dtype and shape; the first rank holds the first tensor and half of the second."""


def values_of(version):
    generator = np.random.default_rng(version)
    return {
        name: generator.integers(0, 256, size, dtype=np.uint8)
        for (name, *_), size in zip(TENSORS, sizes(), strict=True)
    }


def sizes():
    return [int(np.prod(shape)) * {"F32": 4, "BF16": 2, "I64": 8}[dtype] for _, dtype, shape in TENSORS]


def segments_of(rank):
    """First byte in the file, bytes, and first byte in the buffer; with room between, as an alignment leaves it."""
    first, second, third, _ = sizes()
    half = second // 2
    own = [[(100, first), (100 + first, half)], [(100 + first + half, half), (100 + first + second, third)]][rank]
    return tuple((start, size, 16 + index * (first + 48)) for index, (start, size) in enumerate(own))


# What a process does


def lend(state, rank, version):
    """Write a version into this process's buffer; returns what of it rank 0 needs for the manifest."""
    data = np.concatenate([np.zeros(100, np.uint8), *values_of(version).values()])
    segments = segments_of(rank)
    buffer = state.setdefault("buffer", LentBuffer(segments, CPU))
    pieces = []
    for start, size, at in segments:
        buffer.data[at : at + size] = torch.from_numpy(data[start : start + size])
        pieces += tensor_pieces(start, buffer.data[at : at + size])
    return buffer.lend(version), pieces


def spoil(state):
    state["buffer"].data[16 + 5] ^= 1


def read(state, offer, device=CPU):
    weights = LentWeights(offer, device)
    try:
        taken = {name: tensor.view(torch.uint8).numpy().copy() for name, tensor in weights.tensors()}
        weights.verify()
    finally:
        weights.close()
    return taken


def lock(state, handle, version):
    state["lock"] = ReadLock(handle, version)


def offer_of(shares, version, folder):
    starts = 100 + np.cumsum([0, *sizes()[:-1]])
    manifest = Manifest(
        directory=str(folder),
        files=("model.safetensors",),
        tensors=tuple(
            StoredTensor(name=name, dtype=dtype, shape=shape, file=0, start=int(start), num_bytes=size)
            for (name, dtype, shape), start, size in zip(TENSORS, starts, sizes(), strict=True)
        ),
        pieces=tuple(piece for _, pieces in shares for piece in pieces),
        lent=tuple(part for part, _ in shares),
    )
    folder.mkdir(exist_ok=True)
    return manifest.offer(folder / f"manifest-{version}.json", version)


def assert_read(taken, version):
    for name, expected in values_of(version).items():
        assert np.array_equal(taken[name].reshape(-1), expected), name


@pytest.mark.parametrize("kind", ["of-the-host", "of-the-device"])
def test_what_two_ranks_lend_is_read_whole_in_another_process_and_spoiled_bytes_are_named(kind, tmp_path, monkeypatch):
    if kind == "of-the-device":  # as on a GPU, where the bytes have no digest of the host
        monkeypatch.setattr(assembly, "digest_of", lambda data: device_digest(torch.from_numpy(data)))
    with peers(1) as (reader,):
        ranks = [{}, {}]
        offer = offer_of([lend(state, rank, 1) for rank, state in enumerate(ranks)], 1, tmp_path)
        assert_read(reader.ask(read, offer).answer(), 1)
        spoil(ranks[0])
        with pytest.raises(WeightsError, match="policy version 1: other bytes of whole arrived than were published"):
            reader.ask(read, offer).answer()


def test_a_version_is_not_overwritten_while_it_is_read_and_is_gone_afterwards(tmp_path):
    state = {}
    shares = [lend(state, 0, 1), lend({}, 1, 1)]
    offer = offer_of(shares, 1, tmp_path)
    buffer, handle = state["buffer"], shares[0][0].handle
    with peers(1) as (reader,):
        reader.ask(lock, handle, 1).answer()
        with pytest.raises(WeightsError, match=r"an engine still reads policy version 1 .* after 0 s; "):
            buffer.claim(0.1)
        reader.end()
    buffer.claim(10.0)
    with pytest.raises(WeightsGone, match=rf"version 1 is no longer lent: learner process {os.getpid()} is about to"):
        read({}, offer)
    lend(state, 0, 2)
    with pytest.raises(WeightsGone, match="has written version 2 in its place"):
        read({}, offer)


def test_a_reader_that_is_killed_holds_the_rank_up_no_longer():
    state = {}
    (part, _), held = lend(state, 0, 1), threading.Event()

    def claim():
        state["buffer"].claim(20.0)
        held.set()

    with peers(1) as (reader,):
        reader.ask(lock, part.handle, 1).answer()
        thread = threading.Thread(target=claim)
        thread.start()
        assert not held.wait(0.1)
        reader.signal(signal.SIGKILL)
        assert held.wait(10.0)
        thread.join()


def test_the_memory_of_a_rank_that_has_died_is_refused_by_name(tmp_path):
    with peers(2) as ranks:
        shares = [peer.ask(lend, rank, 1).answer() for rank, peer in enumerate(ranks)]
        offer = offer_of(shares, 1, tmp_path)
        assert_read(read({}, offer), 1)
        ranks[1].signal(signal.SIGKILL)
        ranks[1].wait_end()
        with pytest.raises(WeightsGone, match=rf"learner process {shares[1][0].handle.pid} has ended"):
            read({}, offer)


def test_another_process_of_the_same_number_is_not_taken_for_the_rank():
    part, _ = lend({}, 0, 1)
    with pytest.raises(WeightsGone, match="has ended, and another has its number"):
        ReadLock(replace(part.handle, life="0" * 16), 1)


def test_memory_of_a_gpu_that_this_process_does_not_see_is_refused_by_name(tmp_path):
    shares = [lend({}, rank, 1) for rank in range(2)]
    part, pieces = shares[0]
    elsewhere = replace(part, handle=replace(part.handle, gpu="GPU-77", ipc=("00ff", 3)))
    offer = offer_of([(elsewhere, pieces), shares[1]], 1, tmp_path)
    with pytest.raises(WeightsError, match=r"lends memory of GPU GPU-77; this engine sees \[\]"):
        LentWeights(offer, CPU)
    assert LentPart.read(asdict(elsewhere)) == elsewhere


def test_one_changed_word_is_always_found_by_the_digest_of_the_device_and_so_are_words_that_change_places():
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 4001, dtype=np.uint8))
    whole = device_digest(data)
    assert whole.startswith(DEVICE_DIGEST)
    assert device_digest(torch.cat([data[:3], data])[3:]) == whole, "it depends on the bytes, not on where they lie"
    digests = {whole, device_digest(data[:-1]), device_digest(torch.cat([data, torch.zeros(1, dtype=torch.uint8)]))}
    for bit in range(0, 8 * 4001, 997):
        changed = data.clone()
        changed[bit // 8] ^= 1 << bit % 8
        digests.add(device_digest(changed))
    swapped = data.clone()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    digests.add(device_digest(swapped))
    assert len(digests) == 3 + len(range(0, 8 * 4001, 997)) + 1


def test_the_digest_of_the_device_is_the_one_that_plain_arithmetic_gives():
    data = torch.arange(20, dtype=torch.uint8)
    words = np.frombuffer(bytes(range(20)) + bytes(4), dtype="<u8").tolist()

    def final(word):
        signed = (word + (1 << 63)) % (1 << 64) - (1 << 63)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            signed = ((signed ^ (signed >> shift)) * factor + (1 << 63)) % (1 << 64) - (1 << 63)
        return signed

    total = sum(final(word + (place + 1) * 0x9E3779B97F4A7C15) for place, word in enumerate(words)) + final(20)
    assert device_digest(data) == f"{DEVICE_DIGEST}{total % (1 << 64):016x}"
