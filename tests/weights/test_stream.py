"""Rounds: transfers in which all learner ranks broadcast a version over the network to several receivers."""

import asyncio
import signal
import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.core.errors import DeadlineError, WeightsError, WeightsGone
from asyncrl.core.types import Carrier
from asyncrl.weights import rounds, stream
from asyncrl.weights.assembly import TensorAssembly
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.load import FileWeights, load_from
from asyncrl.weights.manifest import (
    Manifest,
    Piece,
    StoredTensor,
    device_digest_of,
    digest_of,
    read_manifest,
    safetensors_header,
)
from asyncrl.weights.received import copy_file
from asyncrl.weights.rounds import ChannelAddress, RoundCoordinator, WeightChannel
from asyncrl.weights.snapshot import WritableFile
from asyncrl.weights.stream import (
    ArrivingWeights,
    WeightGroup,
    WeightSender,
    interface_address,
    new_data_file,
    receive_weights,
)
from tests.support.peers import peers

PIECE_BYTES = 20_000
SPAN_BYTES = 45_000
CALL_S = 1.0
TENSORS = [
    ("count", "I64", (3,), 8),
    ("odd", "F32", (5, 3), 4),
    ("large", "F32", (61, 1021), 4),
    ("half", "BF16", (1000, 7), 2),
]
"""Name, dtype, shape and bytes per value of each tensor. One tensor is larger than a broadcast."""
OPTIONS = PublishOptions(carrier=Carrier.host_stream, num_receivers=2, timeout_s=30.0, num_held=2)


def version_of(number: int) -> tuple[torch.Tensor, list[list[Piece]], Manifest]:
    """Return three values: the random data of a version, the pieces of the two ranks, and the manifest.

    The first rank has the first third of each tensor. The second rank has the remaining two thirds.
    """
    sizes = [(name, dtype, shape, int(np.prod(shape)) * width) for name, dtype, shape, width in TENSORS]
    head, starts = safetensors_header(sizes)
    values = np.random.default_rng(number).integers(0, 256, sum(size[3] for size in sizes), dtype=np.uint8)
    data = np.concatenate([np.frombuffer(head, dtype=np.uint8), values])
    tensors = tuple(
        StoredTensor(name=name, dtype=dtype, shape=shape, file=0, start=start, num_bytes=num_bytes)
        for (name, dtype, shape, num_bytes), start in zip(sizes, starts, strict=True)
    )
    parts: list[list[Piece]] = [[], []]
    for tensor in tensors:
        cut = tensor.start + tensor.num_bytes // 24 * 8
        for part, begin, end in ((0, tensor.start, cut), (1, cut, tensor.start + tensor.num_bytes)):
            for at in range(begin, end, PIECE_BYTES):
                size = min(PIECE_BYTES, end - at)
                parts[part].append(Piece(file=0, start=at, num_bytes=size, digest=digest_of(data[at : at + size])))
    manifest = Manifest(directory=".", files=("model.safetensors",), tensors=tensors, pieces=tuple(parts[0] + parts[1]))
    return torch.from_numpy(data), parts, manifest


# Functions that run in the separate processes


def begin(state, rank, address, options=OPTIONS):
    stream.SPAN_BYTES, rounds.CALL_S = SPAN_BYTES, CALL_S
    state["rank"] = rank
    state["sender"] = WeightSender(options, rank=rank, num_ranks=2, address=address)
    return state["sender"].address


def hold(state, version):
    state["data"], parts, _ = version_of(version)
    state["sender"].hold(version, state["data"], parts[state["rank"]])


def offer(state, version, folder):
    _, parts, manifest = version_of(version)
    target = Path(folder, f"v{version}")
    target.mkdir()
    own = replace(manifest, directory=str(target)).offer(target / "manifest.json", version)
    return state["sender"].offer(own, [len(part) for part in parts])


def receive(state, offered, folder, timeout_s=30.0):
    stream.SPAN_BYTES, rounds.CALL_S = SPAN_BYTES, CALL_S
    began = time.monotonic()
    return asyncio.run(receive_weights(offered, Path(folder), timeout_s=timeout_s)), time.monotonic() - began


def fall_at_the_third_transfer(state, number):
    """Make this process send itself the signal ``number`` before its third transfer, in the middle of a round."""
    calls = []
    for name in ("send", "receive"):
        transfer = getattr(WeightGroup, name)

        def falling(*args, transfer=transfer):
            calls.append(1)
            if len(calls) == 3:
                signal.pthread_kill(threading.get_ident(), number)  # the signal stops or kills the process here
            return transfer(*args)

        setattr(WeightGroup, name, falling)


def arrive(state, offered, timeout_s=30.0):
    """Receive a version as a rank of an engine. Returns a pair: the tensors by name, and the duration in seconds."""
    stream.SPAN_BYTES, rounds.CALL_S = SPAN_BYTES, CALL_S
    began = time.monotonic()

    def take_all(weights):
        taken = {name: tensor.view(torch.uint8).numpy().copy() for name, tensor in weights.tensors()}
        weights.verify()
        return taken

    taken = load_from(offered, torch.device("cpu"), take_all, timeout_s=timeout_s)
    return taken, time.monotonic() - began


def publish(senders, version, folder):
    """Give a version to two sender processes. The first process offers the version."""
    for sender in senders:
        sender.ask(hold, version).answer()
    return senders[0].ask(offer, version, str(folder)).answer()


def start_senders(senders, options=OPTIONS):
    address = senders[0].ask(begin, 0, None, options).answer()
    senders[1].ask(begin, 1, address, options).answer()


def assert_holds(received, version):
    data, _, manifest = version_of(version)
    folder = Path(received.manifest).parent
    assert np.array_equal(np.fromfile(folder / "model.safetensors", dtype=np.uint8), data.numpy())
    assert load_file(folder / "model.safetensors").keys() == {name for name, *_ in TENSORS}
    assert read_manifest(received).pieces == manifest.pieces


def assert_all_arrived(taken, version):
    data, _, manifest = version_of(version)
    assert taken.keys() == {name for name, *_ in TENSORS}
    for stored in manifest.tensors:
        published = data[stored.start : stored.start + stored.num_bytes]
        assert np.array_equal(taken[stored.name].reshape(-1), published), stored.name


def both_ranks(options):
    states = [{}, {}]
    address = begin(states[0], 0, None, options)
    begin(states[1], 1, address, options)
    yield states
    for state in states:
        state["sender"].close()


def receive_in_one_process(folder):
    """Send a version from two ranks to a receiver. All of them run in this process."""
    ranks = both_ranks(replace(OPTIONS, num_receivers=1))
    offered = offered_by(next(ranks), 1, Path(folder))
    assert_holds(asyncio.run(receive_weights(offered, Path(folder, "r"), timeout_s=30.0)), 1)


@pytest.fixture
def short_rounds(monkeypatch):
    monkeypatch.setattr(stream, "SPAN_BYTES", SPAN_BYTES)
    monkeypatch.setattr(rounds, "CALL_S", CALL_S)


@pytest.fixture
def ranks(short_rounds):
    """Yield the two senders of two learner ranks in this process. Their receivers run in threads."""
    yield from both_ranks(OPTIONS)


@pytest.fixture
def ranks_into_engines(short_rounds):
    """Yield the two senders of two learner ranks in this process, which send directly to the ranks of engines."""
    yield from both_ranks(replace(OPTIONS, carrier=Carrier.engine_stream))


def lose_answers_to_calls(monkeypatch):
    take = RoundCoordinator.take

    def losing(self, sender, message):
        if message["kind"] != "present":
            take(self, sender, message)

    monkeypatch.setattr(RoundCoordinator, "take", losing)


def offered_by(ranks, version, folder):
    for state in ranks:
        hold(state, version)
    return offer(ranks[0], version, folder)


def test_receivers_get_every_byte_of_two_ranks(tmp_path):
    with peers(4) as everyone:
        senders, receivers = everyone[:2], everyone[2:]
        start_senders(senders)
        for version in (1, 2):
            offered = publish(senders, version, tmp_path)
            assert offered.carrier == Carrier.host_stream
            for receiver in receivers:
                receiver.ask(receive, offered, str(tmp_path / "received"))
            for receiver in receivers:
                received, _ = receiver.answer()
                assert_holds(received, version)
                assert replace(received, manifest=offered.manifest, carrier=offered.carrier) == offered
                FileWeights(received).verify()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_receiver_that_stops_in_a_round_delays_the_other_only_until_the_deadline(number, tmp_path):
    with peers(4) as everyone:
        senders, (falling, other) = everyone[:2], everyone[2:]
        start_senders(senders, replace(OPTIONS, timeout_s=2.0))
        offered = publish(senders, 1, tmp_path)
        falling.ask(fall_at_the_third_transfer, number).answer()
        falling.ask(receive, offered, str(tmp_path / "received"), 2.0)
        received, seconds = other.ask(receive, offered, str(tmp_path / "received"), 2.0).answer()
        assert_holds(received, 1)
        assert seconds < 15.0
        received, _ = other.ask(receive, publish(senders, 2, tmp_path), str(tmp_path / "received"), 2.0).answer()
        assert_holds(received, 2)


@pytest.mark.long
def test_a_round_with_a_stopped_rank_fails_and_the_rank_sends_after_it_continues(tmp_path):
    with peers(4) as everyone:
        senders, receivers = everyone[:2], everyone[2:]
        start_senders(senders, replace(OPTIONS, timeout_s=1.0))
        offered = publish(senders, 1, tmp_path)
        senders[1].ask(fall_at_the_third_transfer, signal.SIGSTOP).answer()
        for receiver in receivers:
            receiver.ask(receive, offered, str(tmp_path / "received"), 1.0)
        for receiver in receivers:
            with pytest.raises(WeightsError, match=r"version 1 was not received from 127.0.0.1:\d+ in 3 rounds"):
                receiver.answer(20.0)
        senders[1].signal(signal.SIGCONT)
        for receiver in receivers:  # only after some seconds, the rank notices that its round has ended
            receiver.ask(receive, offered, str(tmp_path / "received"), 5.0)
        for receiver in receivers:
            assert_holds(receiver.answer()[0], 1)


@pytest.mark.long
def test_the_death_of_a_rank_in_a_round_raises_weights_error(tmp_path):
    with peers(3) as everyone:
        senders, receiver = everyone[:2], everyone[2]
        start_senders(senders, replace(OPTIONS, timeout_s=1.0, num_receivers=1))
        offered = publish(senders, 1, tmp_path)
        senders[1].ask(fall_at_the_third_transfer, signal.SIGKILL).answer()
        with pytest.raises(WeightsError, match="in 3 rounds"):
            receiver.ask(receive, offered, str(tmp_path / "received"), 1.0).answer(20.0)
        assert not list((tmp_path / "received").iterdir())


@pytest.mark.long
def test_a_stopped_rank_0_raises_a_deadline_error_with_the_option(tmp_path):
    with peers(3) as everyone:
        senders, receiver = everyone[:2], everyone[2]
        start_senders(senders)
        offered = publish(senders, 1, tmp_path)
        senders[0].signal(signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=r"within 4\.0 s: twice rollout_fleet\.load_timeout_s = 0\.5 s"):
            receiver.ask(receive, offered, str(tmp_path / "received"), 0.5).answer()


async def test_a_receiver_that_comes_late_gets_its_own_round(ranks, tmp_path):
    offers = [offered_by(ranks, version, tmp_path) for version in (1, 2, 3)]
    both = await asyncio.gather(*(receive_weights(offers[2], tmp_path / "r", timeout_s=30.0) for _ in range(2)))
    late = await receive_weights(offers[2], tmp_path / "r", timeout_s=30.0)
    for received in (*both, late):
        assert_holds(received, 3)
    assert_holds(await receive_weights(offers[1], tmp_path / "r", timeout_s=30.0), 2)
    with pytest.raises(WeightsGone, match="version 1 is no longer sent"):
        await receive_weights(offers[0], tmp_path / "r", timeout_s=30.0)


async def test_rounds_of_the_same_members_reuse_a_group_and_each_rank_sends_its_bytes_once(
    ranks, tmp_path, monkeypatch
):
    made, sent, init, send = [], Counter(), WeightGroup.__init__, WeightGroup.send

    def making(self, channel, this, place, deadline):
        made.append((this.group, place))
        self.place = place
        init(self, channel, this, place, deadline)

    def sending(self, data, to, deadline):
        sent[self.place, to] += data.nbytes
        return send(self, data, to, deadline)

    monkeypatch.setattr(WeightGroup, "__init__", making)
    monkeypatch.setattr(WeightGroup, "send", sending)
    for version in (1, 2):
        offered = offered_by(ranks, version, tmp_path)
        both = await asyncio.gather(*(receive_weights(offered, tmp_path / "r", timeout_s=30.0) for _ in range(2)))
        for received in both:
            assert_holds(received, version)
    own = [sum(piece.num_bytes for piece in part) for part in version_of(1)[1]]
    assert sent == {(0, 2): 2 * own[0], (1, 2): 2 * own[1], (2, 3): 2 * offered.num_bytes}
    assert sorted(made) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert_holds(await receive_weights(offered, tmp_path / "r", timeout_s=30.0), 2)
    assert sorted(made)[4:] == [(3, 0), (3, 1), (3, 2)], "with fewer receivers, a new group must be made"


async def test_after_a_failed_round_the_same_receivers_form_a_new_group(ranks, tmp_path):
    offers = [offered_by(ranks, version, tmp_path) for version in (1, 2)]
    assert_holds(await receive_weights(offers[0], tmp_path / "r", timeout_s=30.0), 1)
    ranks[1]["data"][-1] ^= 1
    with pytest.raises(WeightsError, match="received bytes of half differ"):
        await receive_weights(offers[1], tmp_path / "r", timeout_s=30.0)
    ranks[1]["data"][-1] ^= 1
    assert_holds(await receive_weights(offers[1], tmp_path / "r", timeout_s=30.0), 2)


@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "damaged"])
def test_bytes_on_a_gpu_are_compared_by_digests_that_it_computes(is_damaged):
    data, _, manifest = version_of(1)
    head = manifest.tensors[0].start
    pieces = sorted(manifest.pieces, key=lambda piece: piece.start)
    digested = [
        replace(piece, digest="", device_digest=device_digest_of(data[piece.start :][: piece.num_bytes].numpy()))
        for piece in pieces
    ]
    cpu = torch.device("cpu")
    data[-1] ^= is_damaged
    assembly = TensorAssembly(replace(manifest, pieces=tuple(digested)), name="v1", device=cpu, digests_there=True)
    if is_damaged:
        with pytest.raises(WeightsError, match="v1: received bytes of half differ"):
            list(assembly.add(digested, data[head:]))
    else:
        assert {name for name, _ in assembly.add(digested, data[head:])} == {name for name, *_ in TENSORS}
    with pytest.raises(WeightsError, match=r"v1: .* no digests for a GPU"):
        TensorAssembly(manifest, name="v1", device=cpu, digests_there=True)


async def test_a_pinned_version_is_sent_even_if_many_versions_are_newer(ranks, tmp_path):
    """While an evaluation pins a version, this version stays offered, because late engines can still need it."""
    pinned = offered_by(ranks, 1, tmp_path)
    for state in ranks:
        state["sender"].retire(1)
    for version in (2, 3, 4):
        offered_by(ranks, version, tmp_path)
    assert_holds(await receive_weights(pinned, tmp_path / "r", timeout_s=30.0), 1)


async def test_only_the_newer_of_two_versions_requested_at_the_same_time_is_sent(ranks, tmp_path):
    offers = [offered_by(ranks, version, tmp_path) for version in (1, 2)]
    pending = [receive_weights(offered, tmp_path / "r", timeout_s=30.0) for offered in offers]
    older, newer = await asyncio.gather(*pending, return_exceptions=True)
    assert isinstance(older, WeightsGone)
    assert_holds(newer, 2)


async def test_a_receiver_that_is_silent_after_its_request_does_not_delay_a_round(ranks, tmp_path):
    offered = offered_by(ranks, 1, tmp_path)
    address = ChannelAddress(endpoint=offered.manifest, access=offered.access)
    with WeightChannel(address).connect(10.0) as silent:
        silent.send({"kind": "ask", "version": 1, "holds": "", "host": ""})
        assert_holds(await receive_weights(offered, tmp_path / "r", timeout_s=30.0), 1)


@pytest.mark.long
async def test_a_receiver_whose_answers_are_lost_repeats_its_request_and_then_raises(ranks, tmp_path, monkeypatch):
    offered = offered_by(ranks, 1, tmp_path)
    lose_answers_to_calls(monkeypatch)
    with pytest.raises(WeightsError, match=r"in 3 rounds: \['this receiver did not answer .* within 1\.0 s', "):
        await receive_weights(offered, tmp_path / "r", timeout_s=30.0)


async def test_a_rank_without_the_version_ends_the_round_before_the_deadline(ranks, tmp_path):
    """If a learner rank no longer has the version, the receivers' requests fail before the deadline of the transfer.

    So the receivers can request a newer version early.
    """
    offered, began = offered_by(ranks, 1, tmp_path), time.monotonic()
    ranks[1]["sender"].retire(2)
    with pytest.raises(WeightsError, match=r"in 3 rounds: \['round 1 of weights is over', 'round 2"):
        await receive_weights(offered, tmp_path / "r", timeout_s=30.0)
    assert time.monotonic() - began < 15.0


async def test_bytes_that_change_in_transfer_are_refused(ranks, tmp_path):
    offered = offered_by(ranks, 1, tmp_path)
    ranks[1]["data"][-1] ^= 1
    with pytest.raises(WeightsError, match=r"in 3 rounds: \['policy version 1: .* half differ .*', "):
        await receive_weights(offered, tmp_path / "r", timeout_s=30.0)
    assert not list((tmp_path / "r").iterdir())


async def test_every_tensor_arrives_complete_on_each_rank_of_an_engine(ranks_into_engines, tmp_path):
    offered = offered_by(ranks_into_engines, 1, tmp_path)
    assert offered.carrier == Carrier.engine_stream
    for taken, _ in await asyncio.gather(*(asyncio.to_thread(arrive, {}, offered) for _ in range(2))):
        assert_all_arrived(taken, 1)


async def test_an_engine_stream_can_send_an_older_version_next_to_a_newer_one(ranks_into_engines, tmp_path):
    offers = [offered_by(ranks_into_engines, version, tmp_path) for version in (1, 2)]
    older, newer = await asyncio.gather(*(asyncio.to_thread(arrive, {}, offered) for offered in offers))
    assert_all_arrived(older[0], 1)
    assert_all_arrived(newer[0], 2)


def test_bytes_that_change_in_transfer_never_reach_an_engines_model(ranks_into_engines, tmp_path):
    offered = offered_by(ranks_into_engines, 1, tmp_path)
    ranks_into_engines[1]["data"][-1] ^= 1
    with pytest.raises(WeightsError, match=r"in 3 rounds: \['policy version 1: .* half differ"):
        arrive({}, offered)


def test_an_engines_rank_whose_answers_are_lost_repeats_its_request_and_then_raises(
    ranks_into_engines, tmp_path, monkeypatch
):
    offered = offered_by(ranks_into_engines, 1, tmp_path)
    lose_answers_to_calls(monkeypatch)
    with pytest.raises(WeightsError, match=r"in 3 rounds: \['this receiver did not answer .* within 1\.0 s', "):
        arrive({}, offered)


def test_a_load_that_ends_early_leaves_the_round_and_the_next_load_succeeds(ranks_into_engines, tmp_path):
    offered = offered_by(ranks_into_engines, 1, tmp_path)
    weights = ArrivingWeights(offered, torch.device("cpu"), timeout_s=10.0)
    next(weights.tensors())
    with pytest.raises(WeightsError, match=r"policy version 1: the model stopped reading .* from "):
        weights.verify()
    weights.close()
    assert_all_arrived(arrive({}, offered)[0], 1)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_after_an_engines_rank_stops_in_a_round_the_other_joins_a_second_round(number, tmp_path):
    with peers(4) as everyone:
        senders, (falling, other) = everyone[:2], everyone[2:]
        start_senders(senders, replace(OPTIONS, timeout_s=5.0, carrier=Carrier.engine_stream))
        offered = publish(senders, 1, tmp_path)
        falling.ask(fall_at_the_third_transfer, number).answer()
        falling.ask(arrive, offered, 5.0)
        taken, seconds = other.ask(arrive, offered, 5.0).answer()
        assert_all_arrived(taken, 1)
        assert seconds < 5.0


def test_a_stopped_learner_rank_raises_a_deadline_error_in_an_engines_rank(tmp_path):
    with peers(3) as everyone:
        senders, receiver = everyone[:2], everyone[2]
        start_senders(senders, replace(OPTIONS, timeout_s=30.0, num_receivers=1, carrier=Carrier.engine_stream))
        offered = publish(senders, 1, tmp_path)
        senders[1].ask(fall_at_the_third_transfer, signal.SIGSTOP).answer()
        with pytest.raises(DeadlineError, match=r"policy version 1 did not arrive from 127.0.0.1:\d+ within"):
            receiver.ask(arrive, offered, 1.5).answer(20.0)


async def test_a_version_of_an_ended_learner_raises_weights_gone_without_waiting(ranks, tmp_path):
    offered = offered_by(ranks, 1, tmp_path)
    with pytest.raises(WeightsGone, match=r"policy version 1 is no longer sent: .* 127\.0\.0\.1:1"):
        await receive_weights(replace(offered, manifest="127.0.0.1:1"), tmp_path / "r", timeout_s=30.0)


def test_a_receiver_without_room_for_the_weights_raises_weights_error(tmp_path, monkeypatch):
    _, _, manifest = version_of(1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("asyncrl.weights.stream.os.posix_fallocate", full)
    with pytest.raises(WeightsError, match=r"no room for \d+ bytes of weights in .*No space left"):
        new_data_file(tmp_path, manifest)


@pytest.mark.long
async def test_a_receiver_without_room_for_the_manifest_raises_weights_error(ranks, tmp_path, monkeypatch):
    offered = offered_by(ranks, 1, tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(WeightsError, match=r"not received from .* in 3 rounds: \['no room for \d+ bytes of weights"):
        await receive_weights(offered, tmp_path / "r", timeout_s=30.0)


def test_the_error_for_a_file_that_cannot_be_created_does_not_blame_a_lack_of_room(tmp_path):
    (tmp_path / "folder").write_text("not a folder")
    _, _, manifest = version_of(1)
    for write in (
        lambda: new_data_file(tmp_path / "folder", manifest),
        lambda: WritableFile(tmp_path / "folder" / "file", 100, []),
        lambda: copy_file(tmp_path / "folder", tmp_path / "folder" / "file"),
    ):
        with pytest.raises(WeightsError, match=r"^\d+ bytes of weights cannot be written to .*/folder: .*Not a dir"):
            write()


def test_the_error_for_a_missing_network_interface_names_the_existing_ones():
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"weights.interface must be .* got 'eth77' .* choose one of \['lo'"):
        interface_address("eth77")


def test_closed_senders_leave_no_thread(ranks):
    for state in ranks:
        state["sender"].close()
    assert not [thread for thread in threading.enumerate() if thread.name == "weight-rounds"]


def test_senders_that_are_closed_in_a_round_leave_no_thread(ranks_into_engines, tmp_path):
    weights = ArrivingWeights(offered_by(ranks_into_engines, 1, tmp_path), torch.device("cpu"), timeout_s=10.0)
    next(weights.tensors())  # the receiver reads only one tensor, so the transfer does not end
    for state in ranks_into_engines:
        state["sender"].close()
    assert not [thread for thread in threading.enumerate() if thread.name == "weight-rounds"]
    weights.close()


def test_a_sender_that_is_closed_while_it_connects_leaves_no_thread():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # this server never answers
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        sender = WeightSender(OPTIONS, rank=1, num_ranks=2, address=ChannelAddress(endpoint=endpoint, access="key"))
        sender.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "weight-rounds"]
