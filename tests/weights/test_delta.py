"""A delta and its base version restore the new version bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from asyncrl.core.errors import WeightsError
from asyncrl.weights.delta import apply_delta, decode, encode, write_delta
from asyncrl.weights.load import FileWeights
from asyncrl.weights.manifest import Change, read_manifest
from tests.support.published_bytes import changed, publish_bytes, random_bytes

ITEMS = {"bf16": 2, "fp32": 4}


@given(data=st.data(), item_bytes=st.sampled_from([1, 2, 4, 8]), num_values=st.integers(1, 2000))
def test_a_delta_of_any_change_is_exact(data, item_bytes, num_values):
    old = random_bytes(num_values, item_bytes).view(f"u{item_bytes}")
    places = data.draw(st.lists(st.integers(0, num_values - 1), unique=True))
    new = old.copy()
    new[places] = data.draw(npst.arrays(f"u{item_bytes}", len(places)))
    assert_exact(old.view(np.uint8), new.view(np.uint8), item_bytes)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 510, 65534, 65535, 65536, 131070, 300_000])
def test_a_delta_with_a_gap_of_any_length_is_exact(gap):
    new = np.zeros(400_000, dtype=np.uint16)
    new[[gap, 2 * gap % 400_000, 399_999]] = 7
    assert_exact(np.zeros(800_000, dtype=np.uint8), new.view(np.uint8), 2)


def assert_exact(old, new, item_bytes):
    found = encode(old, new, item_bytes)
    if found is None:
        assert np.array_equal(old, new)
        return
    num_values, gap_bytes, data = found
    assert len(data) <= len(new)
    place = old.copy()
    decode(change_of(item_bytes, num_values, gap_bytes, data), data, place)
    assert np.array_equal(place, new)


def change_of(item_bytes, num_values, gap_bytes, data):
    return Change(
        start=0,
        item_bytes=item_bytes,
        num_values=num_values,
        gap_bytes=gap_bytes,
        file=0,
        at=0,
        num_bytes=len(data),
    )


def test_a_delta_restores_minus_zero_and_nan_bit_for_bit():
    old = np.array([0.0, np.nan, 1.0, np.nan] * 8, dtype=np.float32)
    new = old.copy()
    new[0] = -0.0
    new.view(np.uint32)[1] ^= 1
    found = encode(old.view(np.uint8), new.view(np.uint8), 4)
    assert found is not None
    assert found[0] == 2
    assert_exact(old.view(np.uint8), new.view(np.uint8), 4)


def test_a_delta_contains_the_whole_piece_if_every_value_has_changed():
    old = random_bytes(1000)
    num_values, gap_bytes, data = encode(old, old + 1, 2)
    assert (num_values, gap_bytes, len(data)) == (1000, 0, 2000)


@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("share", [0.01, 0.05])
def test_a_delta_needs_at_most_two_bytes_per_changed_value_besides_the_value(kind, share, tmp_path):
    item_bytes = ITEMS[kind]
    old = random_bytes(1 << 18, item_bytes)
    new = changed(old, seed=1, share=share, item_bytes=item_bytes)
    num_changed = int((old.reshape(-1, item_bytes) != new.reshape(-1, item_bytes)).any(axis=1).sum())
    write_delta(tmp_path / "delta.bin", 0, old, new, [(0, len(new), item_bytes)])
    assert (tmp_path / "delta.bin").stat().st_size < num_changed * (item_bytes + 2)


@pytest.mark.parametrize("kind", ITEMS)
def test_a_hundred_random_deltas_are_exact(kind, tmp_path):
    item_bytes = ITEMS[kind]
    newest = random_bytes(40_001, item_bytes)
    offer, image = publish_bytes(tmp_path, 0, newest, item_bytes=item_bytes), newest.copy()
    for version in range(1, 101):
        share = (0.0, 0.001, 0.03, 0.9)[version % 4]
        new = changed(newest, seed=version, share=share, item_bytes=item_bytes)
        offer = publish_bytes(tmp_path, version, new, base=(offer, newest), item_bytes=item_bytes)
        assert (offer.kind, offer.base_version) == ("delta", version - 1)
        apply_delta(read_manifest(offer), image)
        assert np.array_equal(image, new), version
        newest = new


@pytest.mark.parametrize("how", ["a bit", "cut", "another base"])
def test_the_error_for_a_damaged_delta_names_its_path(how, tmp_path):
    old = random_bytes(50_000)
    new = changed(old, seed=1)
    offer = publish_bytes(tmp_path, 2, new, base=(publish_bytes(tmp_path, 1, old), old))
    path = tmp_path / "v00000002" / "delta-1.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes({"a bit": content, "cut": content[:50], "another base": path.read_bytes()}[how])
    image = old.copy()
    image[-4:] ^= how == "another base"
    with pytest.raises(WeightsError, match=r"v00000002/delta-1.bin does not turn policy version 1 into .* differ"):
        apply_delta(read_manifest(offer), image)


def test_a_load_refuses_a_delta_that_was_not_applied(tmp_path):
    old = random_bytes(100)
    offer = publish_bytes(tmp_path, 2, old, base=(publish_bytes(tmp_path, 1, old), old))
    with pytest.raises(WeightsError, match=r"version 2 is a delta to version 1; apply the delta"):
        FileWeights(offer)
