"""Hostile bytes always raise WireError, never another exception, and never allocate much memory."""

import struct
import tracemalloc
from contextlib import suppress

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import WireError
from asyncrl.single_controller import DataProto, codec
from asyncrl.single_controller.codec import descriptor
from asyncrl.single_controller.serialization import from_parts, parts_of

PREFIX = b"aRL\x01"
MARK, ARRAY, SCALAR, INT, COMPLEX, TENSOR, FOREIGN = range(7)


def header(value):
    return PREFIX + msgpack.packb(value)


def ext(code, data):
    return msgpack.ExtType(code, data)


def marked(mark, *items):
    return [ext(MARK, mark), *items]


def array(name, *shape):
    return ext(ARRAY, descriptor(name, shape))


def tensor(name, *shape):
    return ext(TENSOR, descriptor(name, shape))


def dense(name, *shape):
    return descriptor(name, shape)


HOSTILE = {
    "no frames": [],
    "an empty frame": [b""],
    "half a prefix": [b"aR"],
    "another protocol": [b"GET / HTTP/1.1\r\n"],
    "a pickle": [b"\x80\x05cos\nsystem\n(S'true'\ntR."],
    "another version": [b"aRL\x02\xc0"],
    "no header after the prefix": [PREFIX],
    "two values": [PREFIX + b"\xc0\xc0"],
    "a code that msgpack does not have": [PREFIX + b"\xc1"],
    "an extension with an unknown code": [header(ext(77, b""))],
    "a string of 4 GB": [PREFIX + b"\xdb\xff\xff\xff\xffabc"],
    "bytes of 4 GB": [PREFIX + b"\xc6\xff\xff\xff\xffabc"],
    "an extension of 4 GB": [PREFIX + b"\xc9\xff\xff\xff\xff\x01abc"],
    "a list of 4 G items": [PREFIX + b"\xdd\xff\xff\xff\xff\xc0"],
    "a map of 4 G items": [PREFIX + b"\xdf\xff\xff\xff\xff\xc0\xc0"],
    "nested lists that claim many items": [PREFIX + b"\xdd\x00\x0f\xff\xff" * 900 + b"\xc0" * 1_000_000],
    "lists in lists": [PREFIX + b"\x91" * 100_000 + b"\xc0"],
    "lists that nest a little too deep": [PREFIX + b"\x91" * 1100 + b"\xc0"],
    "tuples in tuples": [PREFIX + b"\x92\xd4\x00t" * 5000 + b"\xc0"],
    "maps in maps": [PREFIX + b"\x81\xa1k" * 5000 + b"\xc0"],
    "invalid utf-8": [PREFIX + b"\xa2\xff\xfe"],
    "a list as key": [header([1]).replace(b"\x91\x01", b"\x81\x91\x01\x02")],
    "a map as key": [PREFIX + b"\x81\x81\x01\x02\x03"],
    "an array as key": [PREFIX + b"\x81" + msgpack.packb(array(b"<i4", 1)) + b"\xc0", b"1234"],
    "a timestamp out of range": [PREFIX + b"\xc7\x0c\xff" + struct.pack(">Iq", 0, 2**62)],
    "a timestamp of too many nanoseconds": [PREFIX + b"\xc7\x0c\xff" + struct.pack(">Iq", 2**32 - 1, 0)],
    "a surplus buffer": [header(1), b"x"],
    "a missing buffer": [header(array(b"<i4", 1))],
    "a short buffer": [header(array(b"<i4", 2)), b"1234"],
    "a long buffer": [header(array(b"<i4", 1)), b"12345678"],
    "an empty descriptor": [header(ext(ARRAY, b"")), b""],
    "a truncated descriptor": [header(ext(ARRAY, descriptor(b"<i4", (1,))[:-1])), b"1234"],
    "a descriptor that is too long": [header(ext(ARRAY, descriptor(b"<i4", (1,)) + b"x")), b"1234"],
    "a negative dimension": [header(array(b"<i4", -1)), b""],
    "two negative dimensions": [header(array(b"<i4", -1, -1)), b"1234"],
    "dimensions whose product overflows to the buffer's size": [header(array(b"<i4", 2**62, 4)), b""],
    "dimensions whose product overflows to zero": [header(array(b"<i4", 2**32, 2**32)), b""],
    "an impossible zero-size array": [header(array(b"<i4", 2**62, 2**62, 0)), b""],
    "more dimensions than numpy supports": [header(array(b"|u1", *[1] * 65)), b"1"],
    "strings of size zero": [header(array(b"<U0", 2**40)), b""],
    "bytes of size zero": [header(array(b"|S0", 2**40)), b""],
    "a character beyond Unicode": [header(array(b"<U1", 1)), b"\x00\x00\x11\x00"],
    "a scalar beyond Unicode": [header(ext(SCALAR, descriptor(b"<U1", ()) + b"\xff" * 4))],
    "a dtype with pointers": [header(array(b"|O", 1)), b"12345678"],
    "a dtype with pointers in its fields": [header(array(b"O,O", 1)), b"1" * 16],
    "a dtype that is an expression": [header(array(b"(2**9999,)i4", 1)), b"1234"],
    "a dtype of raw memory": [header(array(b"V8", 1)), b"12345678"],
    "a dtype that is not text": [header(array(b"\xff", 1)), b"1"],
    "a dtype of an impossible size": [header(array(b"<U9999999999", 1)), b"1234"],
    "a scalar without bytes": [header(ext(SCALAR, descriptor(b"<i4", ())))],
    "a scalar with a shape": [header(ext(SCALAR, descriptor(b"<i4", (1,)) + b"1234"))],
    "a truncated complex number": [header(ext(COMPLEX, b"12345678"))],
    "a foreign value that was not sent with the message": [header(ext(FOREIGN, b""))],
    "a tensor whose dtype is another attribute of torch": [header(tensor(b"save", 1)), b"1"],
    "a quantized tensor": [header(tensor(b"quint8", 1)), b"1"],
    "an impossible zero-size tensor": [header(tensor(b"int64", 2**62, 2**62, 0)), b""],
    "a tensor whose dimensions overflow": [header(tensor(b"int64", 2**61, 8)), b""],
    "a mark outside of a list": [header({"a": ext(MARK, b"t")})],
    "a mark that is not first": [header([1, ext(MARK, b"t")])],
    "a mark inside a mark": [header(marked(b"t", ext(MARK, b"t")))],
    "an unknown mark": [header(marked(b"?"))],
    "an object array without items": [header(marked(b"o"))],
    "an object array with too few items": [header(marked(b"o", [1], 3))],
    "an object array whose shape overflows": [header(marked(b"o", [], *[2**32, 2**32]))],
    "an object array with a negative shape": [header(marked(b"o", [1], -1, -1))],
    "an object array whose shape is text": [header(marked(b"o", [1], "1"))],
    "an object array whose items are a map": [header(marked(b"o", {"a": 1}, 1))],
    "an object array whose items are text": [header(marked(b"o", "abc", 3))],
    "an object array with a million dimensions": [header(marked(b"o", [1], *[1] * 1_000_000))],
    "object arrays that nest too deep": [
        PREFIX + b"\x93\xd4\x00o\x91" * 1100 + b"\xc0" + b"\x01" * 1100,
    ],
    "repeated objects without indices": [header(marked(b"d", [1], 1))],
    "repeated objects with an index above the items": [header(marked(b"d", [1], array(b"<i8", 1))), b"\1" + b"\0" * 7],
    "repeated objects with a negative index": [header(marked(b"d", [1], array(b"<i8", 1))), b"\xff" * 8],
    "repeated objects without items": [header(marked(b"d", [], array(b"<i8", 1))), b"\0" * 8],
    "repeated objects whose items are a map": [header(marked(b"d", {"a": 1}, array(b"<i8", 1))), b"\0" * 8],
    "repeated objects with indices of a small dtype": [header(marked(b"d", [1], array(b"|u1", 1))), b"\0"],
    "a string array of numbers": [header(marked(b"s", [1], 1))],
    "a structured array without fields": [header(marked(b"r", [1], False, [], []))],
    "a structured array whose field is text": [header(marked(b"r", [1], False, ["a"], ["b"]))],
    "a structured array whose fields have different lengths": [
        header(marked(b"r", [2], False, ["a", "b"], [array(b"|u1", 2), array(b"|u1", 1)])),
        *(b"12", b"1"),
    ],
    "a structured array with the same name twice": [
        header(marked(b"r", [1], False, ["a", "a"], [array(b"|u1", 1), array(b"|u1", 1)])),
        *(b"1", b"1"),
    ],
    "a structured array with a field without values": [
        header(marked(b"r", [9], True, ["a", "b"], [array(b"|u1", 9), array(b"<f8", 9, 0)])),
        *(b"1" * 9, b""),
    ],
    "a structured array of very many empty values": [
        header(marked(b"r", [2**40], False, ["a"], [array(b"|u1", 2**40, 0)])),
        b"",
    ],
    "columns with more names than tensors": [header(marked(b"c", "a", dense(b"int8", 1), "b")), b"1"],
    "columns of numbers": [header(marked(b"c", "a", 1))],
    "columns of text": [header(marked(b"c", "a", "abc"))],
    "columns with a list as a name": [header(marked(b"c", [], dense(b"int8", 1))), b"1"],
    "a nested tensor without rows": [header(marked(b"n", []))],
    "a nested tensor with an empty list of rows": [header(marked(b"n", [[]]))],
    "a nested tensor whose rows have different dtypes": [
        header(marked(b"n", [[dense(b"int8", 1), dense(b"bool", 1)]])),
        b"1",
        b"\x01",
    ],
    "a nested tensor of nested tensors": [
        header(marked(b"n", [[[[dense(b"int8", 1)]], [[dense(b"int8", 1)]]]])),
        *(b"1", b"1"),
    ],
    "a nested tensor whose rows are not a list": [header(marked(b"n", dense(b"int8", 1))), b"1"],
}


def jagged_message(values, offsets, lengths, ragged_dim):
    parts = [np.asarray(part) for part in (values, offsets, *([] if lengths is None else [lengths]))]
    names = [{"i": b"int64", "f": b"float64"}[part.dtype.kind] for part in parts]
    described = [dense(name, *part.shape) for name, part in zip(names, parts, strict=True)]
    description = [*described[:2], described[2] if lengths is not None else None, ragged_dim]
    return [header(marked(b"n", description)), *(part.tobytes() for part in parts)]


JAGGED = {
    "offsets beyond the values": ([1.0, 2.0], [0, 1, 3], None, 1),
    "offsets that decrease": ([1.0, 2.0], [0, 2, 1], None, 1),
    "offsets below zero": ([1.0, 2.0], [0, -1, 2], None, 1),
    "offsets whose difference overflows": ([1.0, 2.0], [0, 2**63 - 1, -(2**63)], None, 1),
    "offsets that do not begin at zero": ([1.0, 2.0], [1, 2], None, 1),
    "no offsets": ([1.0, 2.0], np.zeros(0, dtype=int), None, 1),
    "offsets with two dimensions": ([1.0, 2.0], [[0, 2]], None, 1),
    "offsets that are floats": ([1.0, 2.0], [0.0, 2.0], None, 1),
    "lengths longer than their rows": ([1.0, 2.0], [0, 1, 2], [1, 2], 1),
    "lengths below zero": ([1.0, 2.0], [0, 1, 2], [1, -1], 1),
    "too few lengths": ([1.0, 2.0], [0, 1, 2], [1], 1),
    "the batch dimension as the ragged dimension": ([1.0, 2.0], [0, 2], None, 0),
    "a ragged dimension that does not exist": ([1.0, 2.0], [0, 2], None, 2),
    "a ragged dimension that is a bool": ([1.0, 2.0], [0, 2], None, True),
    "a ragged dimension that is text": ([1.0, 2.0], [0, 2], None, "1"),
}
HOSTILE |= {f"a jagged tensor with {what}": jagged_message(*parts) for what, parts in JAGGED.items()}


@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE)
def test_hostile_messages_raise_wire_error_and_allocate_little_memory(frames):
    size = sum(map(len, frames))
    tracemalloc.start()
    with pytest.raises(WireError):
        codec.decode(frames)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * size + 200_000


def test_valid_messages_in_the_form_of_the_hostile_ones_are_decoded():
    assert codec.decode([header(array(b"<i4", 1)), b"\1\0\0\0"]).tolist() == [1]
    assert codec.decode([header(tensor(b"int8", 2)), b"\1\2"]).tolist() == [1, 2]
    assert codec.decode([header(marked(b"t", 1, 2))]) == (1, 2)
    assert codec.decode([header(marked(b"o", [1], 1))]).tolist() == [1]
    assert codec.decode([header(marked(b"d", [1], array(b"<i8", 1))), b"\0" * 8]).tolist() == [1]
    assert codec.decode([header(marked(b"c", "a", dense(b"int8", 1))), b"\1"])["a"].tolist() == [1]
    assert codec.decode(jagged_message([1.0, 2.0], [0, 1, 2], None, 1)).size(0) == 2
    assert codec.decode([header(marked(b"n", [[dense(b"int8", 1)]])), b"1"]).is_nested
    record = [header(marked(b"r", [2], True, ["a", "b"], [array(b"|u1", 2), array(b"<f8", 2)])), b"12", b"1" * 16]
    assert codec.decode(record).dtype.names == ("a", "b")
    assert codec.decode([PREFIX + b"\x91" * 100 + b"\xc0"]) is not None


def test_frames_that_are_not_buffers_raise_wire_error():
    released = memoryview(b"aRL\x01\xc0")
    released.release()
    for frames in (["aRL\x01"], [1], [None], b"aRL\x01\xc0", [np.zeros((2, 2)).T], [released]):
        with pytest.raises(WireError):
            codec.decode(frames)


@pytest.mark.parametrize(
    "parts",
    [
        None,
        [],
        {},
        {"batch": None, "non_tensor_batch": {}, "meta_info": []},
        {"batch": None, "non_tensor_batch": {"a": [1]}, "meta_info": {}},
        {"batch": None, "non_tensor_batch": {"a": np.zeros(2), "b": np.zeros(3)}, "meta_info": {}},
        {"batch": [1, {"a": torch.zeros(2)}], "non_tensor_batch": {}, "meta_info": {}},
        {"batch": [2, {"a": torch.zeros(2)}], "non_tensor_batch": {"b": np.zeros(1)}, "meta_info": {}},
        {"batch": [-1, {}], "non_tensor_batch": {}, "meta_info": {}},
        {"batch": [2**70, {}], "non_tensor_batch": {}, "meta_info": {}},
        {"batch": ["1", {}], "non_tensor_batch": {}, "meta_info": {}},
        {"batch": [0, {1: torch.zeros(0)}], "non_tensor_batch": {}, "meta_info": {}},
        {"batch": [1, {"a": [1]}], "non_tensor_batch": {}, "meta_info": {}},
        {"batch": [0], "non_tensor_batch": {}, "meta_info": {}},
        {"batch": 1, "non_tensor_batch": {}, "meta_info": {}},
    ],
)
def test_a_message_that_is_not_a_batch_raises_wire_error(parts):
    with pytest.raises(WireError, match="not a DataProto"):
        from_parts(DataProto, parts)


NESTED = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.jagged)
VALID = [
    {"a": [1, 2.5, None, "text", b"bytes", 2**70, 1j, (1, (2,))], (3, 4): {1: True}},
    [np.arange(6).reshape(2, 3), np.zeros((0, 4)), np.array(["x", "yy"]), np.array([True, False]), np.float32(1)],
    np.array([{"k": [1, (2,)]}, None, "text"], dtype=object),
    np.array([(1, 2.0), (3, 4.0)], dtype=[("x", "i4"), ("y", "f8", (1,))]),
    [torch.arange(4), torch.ones(2, 2).bfloat16(), torch.tensor(True), NESTED],
    parts_of(DataProto.from_dict({"x": torch.arange(2), "j": NESTED}, {"s": ["a", "b"]}, {"t": (1, 2)})),
]
MESSAGES = [[bytes(frame) for frame in codec.encode(value)] for value in VALID]
LARGE = [b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\0" * 8, struct.pack("<q", 2**62), struct.pack("<q", -1)]


@st.composite
def mutated(draw):
    """Return a valid message after a few changes.

    The changes are bit flips, cuts, insertions, splices, lost frames and added frames. A change can also replace eight
    bytes by an extreme integer.
    """
    frames = [bytearray(frame) for frame in draw(st.sampled_from(MESSAGES))]
    for _ in range(draw(st.integers(1, 4))):
        frame = frames[draw(st.integers(0, len(frames) - 1)) if draw(st.booleans()) else 0]
        at = draw(st.integers(0, len(frame)))
        match draw(st.sampled_from(["flip", "cut", "insert", "splice", "large", "drop", "add"])):
            case "flip" if at < len(frame):
                frame[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del frame[at : at + draw(st.integers(1, 40))]
            case "insert":
                frame[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "splice":
                other = draw(st.sampled_from(draw(st.sampled_from(MESSAGES))))
                start = draw(st.integers(0, len(other)))
                frame[at:at] = other[start : start + draw(st.integers(1, 40))]
            case "large":
                frame[at : at + 8] = draw(st.sampled_from(LARGE))
            case "drop" if len(frames) > 1:
                frames.pop()
            case "add":
                frames.append(bytearray(draw(st.binary(max_size=16))))
    return [bytes(frame) for frame in frames]


@pytest.mark.long
@given(mutated())
@settings(max_examples=600)
def test_mutated_messages_decode_or_raise_wire_error(frames):
    with suppress(WireError):
        value = codec.decode(frames)
        if isinstance(value, dict) and "batch" in value:
            from_parts(DataProto, value).get_data_info()
