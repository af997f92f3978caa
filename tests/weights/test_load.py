"""The verified load of weights in an engine's server, with very small models."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import zmq
from safetensors.torch import save_file
from torch import nn

from asyncrl.core.errors import WeightsError, WeightsGone
from asyncrl.core.types import FROZEN, Carrier, WeightOffer
from asyncrl.weights.assembly import DeviceDigests
from asyncrl.weights.load import ComparedWrites, FileWeights, load_verified, open_weights, submissions_run_at_once
from asyncrl.weights.manifest import PIECE_BYTES, AdaptedLayer, Adapter, DigestThreads, device_digest_of
from benchmarks.gpu_publish import h2d_bytes_per_published_byte
from benchmarks.saved_weights import describe_model


class Model(nn.Module):
    """A model that loads each published tensor with the function ``load(parameters, name, tensor)``."""

    def __init__(self, load, **parameters):
        super().__init__()
        self.held = nn.ParameterDict({name: nn.Parameter(value) for name, value in parameters.items()})
        self._load = load

    def load_weights(self, tensors):
        with torch.no_grad():
            for name, tensor in tensors:
                self._load(self.held, name, tensor)


@pytest.fixture
def offer_of(tmp_path):
    """Return a function that publishes tensors.

    With ``spoil=True``, the function changes the last bit of the file after the digest was computed.
    """

    def make(spoil=False, for_device=False, **tensors):
        file = tmp_path / "model.safetensors"
        save_file(tensors, file)
        manifest = describe_model(str(tmp_path), for_device=for_device)
        offer = manifest.offer(tmp_path / "manifest.json", 7)
        if spoil:
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        return offer

    return make


def copy_whole(held, name, tensor):
    held[name].copy_(tensor)


def test_a_load_counts_copied_fused_and_converted_values(offer_of):
    def load(held, name, tensor):
        if name in ("q", "k"):
            held["qk"][: 4 if name == "q" else None][-4:].copy_(tensor)
        else:
            held[name].copy_(tensor)

    q, k, narrow = torch.randn(4, 3), torch.randn(4, 3), torch.randn(5).bfloat16()
    model = Model(load, qk=torch.zeros(8, 3), narrow=torch.zeros(5))
    assert load_verified(model, offer_of(q=q, k=k, narrow=narrow)) == 29
    assert torch.equal(model.held["qk"].detach(), torch.cat([q, k]))
    assert torch.equal(model.held["narrow"].detach(), narrow.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["copied", "converted"])
def test_a_load_detects_one_changed_bit_and_names_the_tensor(offer_of, dtype):
    model = Model(copy_whole, a=torch.zeros(4), b=torch.zeros(6))
    offer = offer_of(spoil=True, a=torch.randn(4).to(dtype), b=torch.randn(6).to(dtype))
    with pytest.raises(WeightsError, match=r"policy version 7: .* 1 of 2 tensors differ, first b"):
        load_verified(model, offer)


def test_the_error_for_a_partly_loaded_parameter_names_the_number_of_values(offer_of):
    model = Model(lambda held, name, tensor: held[name][:2].copy_(tensor[:2]), a=torch.zeros(4))
    with pytest.raises(WeightsError, match=r"not completely loaded, first held\.a with 2 of 4"):
        load_verified(model, offer_of(a=torch.randn(4)))


def test_a_load_verifies_both_tensors_that_write_to_the_same_region(offer_of):
    first, second = torch.full((3 << 20,), 1.0), torch.full((3 << 20,), 2.0)
    model = Model(lambda held, _, tensor: held["a"].copy_(tensor), a=torch.zeros(3 << 20))
    assert load_verified(model, offer_of(a=first, b=second)) == 3 << 20
    assert model.held["a"][0] == 2.0


@pytest.mark.parametrize("num_bytes", [1, 4, 7, 1001, 600_006, PIECE_BYTES])
def test_host_and_device_compute_the_same_digest_and_any_changed_bit_changes_it(num_bytes):
    data = np.random.default_rng(0).integers(0, 256, num_bytes + 3, dtype=np.uint8)
    digests = DeviceDigests(torch.device("cpu"))
    for first in (0, 1, 2):
        own = data[first : first + num_bytes]
        digest = device_digest_of(own)
        assert digest == int(*digests.of(torch.from_numpy(data)[first : first + num_bytes], [num_bytes]))
        for byte in {0, num_bytes // 2, num_bytes - 1}:
            for bit in (1, 128):
                own[byte] ^= bit
                assert device_digest_of(own) != digest
                own[byte] ^= bit


def test_a_device_digest_is_the_sum_of_words_times_splitmix_factors():
    assert device_digest_of(np.zeros(9, dtype=np.uint8)) == 0
    # The digest uses outputs of SplitMix64 as factors. The last two constants are its first outputs for state 0.
    factors = [1, 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1]
    words = np.array([3, -2, 5], dtype=np.int32)
    total = sum(int(word) * factor for word, factor in zip(words, factors, strict=True)) % (1 << 64)
    assert device_digest_of(words.view(np.uint8)) % (1 << 64) == total


def fused(held, name, tensor):
    if name in ("q", "k"):
        held["qk"][: 5 if name == "q" else None][-5:].copy_(tensor)
    else:
        held[name].copy_(tensor)


def load_copies(offer, model):
    """Load weights as on a GPU: copy the tensors to the device, and compare the digests of the copies."""
    weights = FileWeights(offer, torch.device("cpu"))
    with ComparedWrites(dict(model.named_parameters()), weights) as writes:
        model.load_weights(weights.tensors())
    writes.check(offer.version)
    return writes.num_values


@pytest.mark.parametrize("for_device", [True, False], ids=["device-digests", "host-digests"])
def test_copies_on_a_device_are_compared_with_published_digests(offer_of, for_device, monkeypatch):
    monkeypatch.setattr("asyncrl.weights.load.BUCKET_BYTES", 1 << 20)
    tensors = {"q": torch.randn(5, 3), "k": torch.randn(5, 3), "large": torch.randn(2_100_001).bfloat16()}
    model = Model(fused, qk=torch.zeros(10, 3), large=torch.zeros(2_100_001, dtype=torch.bfloat16))
    assert load_copies(offer_of(for_device=for_device, **tensors), model) == 30 + 2_100_001
    assert torch.equal(model.held["qk"].detach(), torch.cat([tensors["q"], tensors["k"]]))
    assert torch.equal(model.held["large"].detach(), tensors["large"])
    with pytest.raises(WeightsError, match=r"policy version 7: .* 1 of 3 tensors differ, first large"):
        load_copies(offer_of(spoil=True, for_device=for_device, **tensors), model)


def test_each_published_byte_is_copied_to_the_device_once():
    assert h2d_bytes_per_published_byte() == 1.0


@pytest.fixture
def adapter_of(offer_of, tmp_path):
    """Return a function that publishes frozen weights and an adapter of the weight called ``name``."""

    def make(down, up, scale, *, name="w", spoil=False, **frozen):
        base = replace(offer_of(**frozen), version=FROZEN)
        folder = tmp_path / "v7"
        folder.mkdir()
        save_file({"down": down, "up": up}, folder / "adapter_model.safetensors")
        layer = AdaptedLayer(weight=name, down="down", up="up", scale=scale)
        manifest = replace(describe_model(str(folder)), adapter=Adapter(base=base, layers=(layer,)))
        offer = manifest.offer(folder / "manifest.json", 7)
        if spoil:
            save_file({"down": down + 1, "up": up}, folder / "adapter_model.safetensors")
        return offer

    return make


def test_a_load_merges_an_adapter_into_the_frozen_weights(adapter_of):
    down, up, w, other = torch.randn(2, 3), torch.randn(4, 2), torch.randn(4, 3), torch.randn(5)
    model = Model(copy_whole, w=torch.zeros(4, 3), other=torch.zeros(5))
    offer = adapter_of(down, up, 0.5, w=w, other=other)
    assert (offer.kind, offer.base_version, offer.num_bytes) == ("adapter", FROZEN, 4 * (6 + 8 + 12 + 5))
    assert load_verified(model, offer) == 17
    torch.testing.assert_close(model.held["w"].detach(), w + 0.5 * up @ down)
    assert torch.equal(model.held["other"].detach(), other)


def test_an_adapter_with_changed_bytes_is_refused_before_the_model_changes(adapter_of):
    model = Model(copy_whole, w=torch.zeros(4, 3))
    offer = adapter_of(torch.randn(2, 3), torch.randn(4, 2), 1.0, w=torch.randn(4, 3), spoil=True)
    with pytest.raises(WeightsError, match=r"policy version 7: .* 1 of 2 tensors differ, first down"):
        load_verified(model, offer)
    assert not model.held["w"].any()


def test_frozen_weights_with_changed_bytes_raise_with_the_tensor_name(adapter_of, tmp_path):
    model = Model(copy_whole, w=torch.zeros(4, 3))
    offer = adapter_of(torch.randn(2, 3), torch.randn(4, 2), 1.0, w=torch.randn(4, 3))
    save_file({"w": torch.randn(4, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"the frozen weights: .* 1 of 1 tensors differ, first w"):
        load_verified(model, offer)


def test_an_adapter_of_a_missing_weight_is_refused_with_its_name(adapter_of):
    model = Model(copy_whole, w=torch.zeros(4, 3))
    offer = adapter_of(torch.randn(2, 3), torch.randn(4, 2), 1.0, name="absent", w=torch.randn(4, 3))
    with pytest.raises(WeightsError, match="1 of 1 adapted weights are missing, first absent"):
        load_verified(model, offer)


class ModelThatLoadsInThreads(Model):
    """A model that copies tensors in a thread pool, like SGLang's DeepSeek-V2/V3, GLM, Hunyuan and LongCat."""

    def load_weights(self, tensors):
        with ThreadPoolExecutor(4) as threads:
            copies = [threads.submit(self._load, self.held, name, tensor) for name, tensor in tensors]
            for copy in as_completed(copies):
                copy.result()


@torch.no_grad()
def copy_without_gradient(held, name, tensor):
    held[name].copy_(tensor)


def test_a_load_that_copies_in_threads_is_verified(offer_of):
    whole = {name: torch.randn(3, 5) for name in "abcdef"}
    model = ModelThatLoadsInThreads(copy_without_gradient, **{name: torch.zeros(3, 5) for name in whole})
    assert load_verified(model, offer_of(**whole)) == 6 * 15
    assert all(torch.equal(model.held[name].detach(), value) for name, value in whole.items())


def test_an_incomplete_load_in_threads_is_refused(offer_of):
    @torch.no_grad()
    def copy_part(held, name, tensor):
        held[name][: 2 if name == "b" else None].copy_(tensor[: 2 if name == "b" else None])

    model = ModelThatLoadsInThreads(copy_part, a=torch.zeros(4), b=torch.zeros(4))
    with pytest.raises(WeightsError, match=r"not completely loaded, first held.b with 2 of 4"):
        load_verified(model, offer_of(a=torch.randn(4), b=torch.randn(4)))


def test_an_error_of_a_copy_in_a_thread_is_raised_by_the_load(offer_of):
    def fail(held, name, tensor):
        raise KeyError(name)

    with pytest.raises(KeyError, match="a"):
        load_verified(ModelThatLoadsInThreads(fail, a=torch.zeros(4)), offer_of(a=torch.randn(4)))


def test_digest_threads_and_other_threads_can_use_pools_during_a_load():
    before, this_thread = ThreadPoolExecutor.submit, threading.get_ident()
    with DigestThreads(1) as digests, ThreadPoolExecutor(1) as models, submissions_run_at_once():
        assert models.submit(threading.get_ident).result() == this_thread
        other_thread = digests.submit(threading.get_ident).result()
        assert this_thread not in {other_thread, *digests.map(lambda _: threading.get_ident(), range(2))}
        submitted_there = digests.submit(lambda: models.submit(threading.get_ident).result()).result()
        assert submitted_there not in (this_thread, other_thread)
    assert ThreadPoolExecutor.submit is before


def test_a_stream_is_opened_for_an_offer_that_was_read_from_json():
    """An SGLang server reads offers from JSON. In such an offer, ``carrier`` is a plain string, not a `Carrier`."""
    access = b"".join(zmq.curve_keypair()).decode()
    offer = WeightOffer(version=1, manifest="127.0.0.1:1", digest="", num_bytes=0, access=access)
    fields = json.loads(json.dumps(asdict(replace(offer, carrier=Carrier.engine_stream))))
    with pytest.raises(WeightsGone, match="nobody listens at"):
        open_weights(WeightOffer(**fields), torch.device("cpu"), timeout_s=10.0)
