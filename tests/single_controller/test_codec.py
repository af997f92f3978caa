"""The codec restores every encoded value, and raises WireError for any other input."""

import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from asyncrl.core.errors import WireError
from asyncrl.single_controller import codec
from asyncrl.single_controller.columns import deep_equal

PREFIX = b"aRL\x01"

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False)
)
plain_dtypes = (
    npst.boolean_dtypes()
    | npst.integer_dtypes()
    | npst.unsigned_integer_dtypes()
    | npst.floating_dtypes()
    | npst.complex_number_dtypes()
    | npst.unicode_string_dtypes(max_len=4)
    | npst.byte_string_dtypes(max_len=4)
    | npst.datetime64_dtypes()
)
arrays = plain_dtypes.flatmap(lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, min_side=0, max_side=4)))
records = st.builds(
    lambda numbers, texts: np.array(list(zip(numbers, texts, strict=False)), dtype=[("n", "<i8"), ("t", "<U3")]),
    st.lists(st.integers(-9, 9), max_size=3),
    st.lists(st.text(max_size=3).filter(lambda text: not text.endswith("\0")), max_size=3),
)
torch_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
nested_tensors = st.builds(
    lambda sizes, dtype: torch.nested.nested_tensor([torch.ones(n, 2) for n in sizes], layout=torch.jagged).to(dtype),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    torch_dtypes,
)
tensors = st.builds(
    lambda shape, dtype: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    torch_dtypes,
)


def object_array(items):
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item
    return array


values = st.recursive(
    scalars | arrays | records | tensors | nested_tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(object_array)
        | st.lists(inner, max_size=2).map(lambda items: object_array(items * 2))
        | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def as_received(frames):
    return [bytes(frame) for frame in frames]


@given(values)
@settings(max_examples=200)
def test_decoding_restores_any_nested_value(value):
    assert deep_equal(codec.decode(as_received(codec.encode(value))), value)


@given(st.lists(st.binary(max_size=40), max_size=4))
@settings(max_examples=300)
def test_random_bytes_raise_only_wire_error(frames):
    for candidate in (frames, [PREFIX + frames[0], *frames[1:]] if frames else frames):
        with suppress(WireError):
            codec.decode(candidate)


@given(values, st.data())
@settings(max_examples=100)
def test_truncated_messages_raise_wire_error(value, data):
    frames = as_received(codec.encode(value))
    header = frames[0][: data.draw(st.integers(0, len(frames[0]) - 1))]
    with pytest.raises(WireError):
        codec.decode([header, *frames[1:]])


def test_buffers_are_not_copied_on_either_side():
    array = np.arange(1000, dtype=np.int32)
    frames = codec.encode({"a": array})
    decoded = codec.decode(frames)["a"]
    assert np.shares_memory(decoded, array)
    assert not decoded.flags.writeable


def test_an_object_that_occurs_several_times_in_an_array_is_sent_once():
    """After `DataProto.repeat`, several rows of a batch refer to the same image object."""
    images = [{"pixels": np.zeros(10_000)}, {"pixels": np.ones(10_000)}]
    array = object_array(images).repeat(16).reshape(4, 8)
    frames = as_received(codec.encode(array))
    assert sum(map(len, frames)) < 3 * 80_000
    decoded = codec.decode(frames)
    assert deep_equal(decoded, array)
    assert decoded[0, 0] is decoded[1, 7]


def test_a_tensor_from_read_only_memory_is_a_writable_copy():
    frame = as_received(codec.encode(torch.zeros(4)))
    tensor = codec.decode(frame)
    tensor += 1
    assert codec.decode(frame).tolist() == [0, 0, 0, 0]


def test_decoded_columns_are_views_of_the_received_buffer():
    frames = as_received(codec.encode(codec.Columns({"a": torch.arange(4)})))
    tensor = codec.decode(frames)["a"]
    assert tensor.data_ptr() == np.frombuffer(frames[1], dtype=np.uint8).ctypes.data


def test_the_codec_restores_jagged_tensors_with_and_without_gaps():
    nested = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.jagged)
    holes = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([0, 3, 6]), torch.tensor([1, 2]))
    for tensor in (nested, holes):
        rows = codec.decode(as_received(codec.encode(tensor))).unbind()
        assert [row.tolist() for row in rows] == [row.tolist() for row in tensor.unbind()]


def test_the_codec_restores_non_contiguous_views_and_other_byte_orders():
    for array in (np.arange(12).reshape(3, 4).T, np.arange(5, dtype=">i4"), np.arange(10)[::2]):
        decoded = codec.decode(as_received(codec.encode(array)))
        assert decoded.dtype == array.dtype
        np.testing.assert_array_equal(decoded, array)


def test_numpy_scalars_keep_their_type():
    for scalar in (np.float32(1.5), np.int8(-3), np.bool_(True), np.datetime64("2020-02-02"), np.float64("nan")):
        assert type(codec.decode(codec.encode(scalar))) is type(scalar)


def test_the_error_names_the_path_of_an_unsupported_value():
    with pytest.raises(WireError, match=r"value\['a'\]\[1\]\[0\]: the codec does not support object"):
        codec.encode({"a": [0, np.array([object(), 1], dtype=object)]})


def test_values_that_the_codec_cannot_encode_are_passed_in_the_list_foreign():
    foreign = []
    frames = codec.encode({"f": len, "x": 1}, foreign=foreign)
    assert foreign == [len]
    assert codec.decode(frames, foreign=foreign) == {"f": len, "x": 1}
    with pytest.raises(WireError, match="value that was not sent"):
        codec.decode(frames)


def test_a_list_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(WireError, match="contain itself"):
        codec.encode(loop)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"k": inner}])
def test_values_can_nest_only_some_hundred_levels_deep(wrap):
    value = 1
    for depth in range(1100):
        value = wrap(value)
        if depth == 400:
            assert codec.decode(codec.encode(value)) == value
    with pytest.raises(WireError, match="too deep"):
        codec.encode(value)


def test_missing_and_additional_buffers_are_refused():
    frames = codec.encode([np.zeros(10), np.zeros(10)])
    with pytest.raises(WireError, match="truncated"):
        codec.decode(frames[:2])
    with pytest.raises(WireError, match="buffers"):
        codec.decode([*frames, b""])
    with pytest.raises(WireError, match="needs"):
        codec.decode([frames[0], b"123", frames[2]])


def test_the_error_names_an_unknown_version_of_the_format():
    with pytest.raises(WireError, match="version 2"):
        codec.decode([b"aRL\x02\xc0"])


def test_the_codec_needs_no_torch_and_does_not_load_it():
    code = (
        "import sys, numpy as np\n"
        "from asyncrl.single_controller import codec\n"
        "from asyncrl.core.errors import WireError\n"
        "assert codec.decode(codec.encode({'a': np.ones(2)}))['a'].sum() == 2\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
        f"frames = {as_received(codec.encode(torch.ones(1)))!r}\n"
        "try:\n    codec.decode(frames)\nexcept WireError as error:\n    assert 'torch' in str(error)\n"
        "else:\n    raise SystemExit('decoded')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
