"""The codec restores every dtype of numpy and torch in every layout."""

import datetime

import numpy as np
import pytest
import torch

from asyncrl.core.errors import WireError
from asyncrl.single_controller import codec
from asyncrl.single_controller.columns import deep_equal

NUMPY_DTYPES = [
    *("?", "i1", "u1", "<i2", ">i2", "<u4", ">u4", "<i8", ">i8", "<u8", "g", "G"),
    *("<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "<c8", ">c8", "<c16", ">c16"),
    *("S3", "<U3", ">U3", "M8[ns]", ">M8[D]", "M8[25s]", "m8[h]", "m8", "M8"),
]
SHAPES = [(), (1,), (4,), (0,), (0, 3), (2, 0), (2, 3), (1, 1, 2, 1)]
STRUCTURES = [
    [("a", "<i4"), ("b", "S3")],
    [("a", "<i4"), ("b", ">f8", (2, 2))],
    [("a", "?"), ("inner", [("x", "<f4"), ("y", "<U2")])],
    [("a", "O"), ("b", "<i8")],
    [("a", "M8[us]")],
]
TORCH_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
]


def received(value):
    return codec.decode([bytes(frame) for frame in codec.encode(value)])


def array_of(dtype, shape):
    numbers = np.arange(int(np.prod(shape))).reshape(shape) % 7
    return numbers.astype("i8").astype(dtype) if dtype in ("M8", "m8") else numbers.astype(dtype)


def same_array(left, right):
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    assert left.dtype.isalignedstruct == right.dtype.isalignedstruct
    assert deep_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numpy_arrays(dtype, shape):
    array = array_of(dtype, shape)
    same_array(received(array), array)
    same_array(received(array.T), array.T)
    same_array(received(array[::-1] if shape else array), array[::-1] if shape else array)
    for scalar in array.reshape(-1)[:2]:
        back = received(scalar)
        assert type(back) is type(scalar)
        assert deep_equal(np.asarray(back), np.asarray(scalar))


@pytest.mark.parametrize("fields", STRUCTURES)
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 2)])
def test_structured_arrays(fields, align, shape):
    array = np.zeros(shape, dtype=np.dtype(fields, align=align))
    for name in array.dtype.names:
        if array.dtype[name].names is None:
            array[name] = np.ones(array[name].shape, dtype="i8").astype(array.dtype[name].base)
    same_array(received(array), array)


def test_the_codec_restores_long_strings_special_floats_and_mapped_files(tmp_path):
    strings = np.array([["", "a" * 300], ["ü", "\U0001f600"]], dtype=np.dtypes.StringDType())
    assert received(strings).dtype == strings.dtype
    assert received(strings).tolist() == strings.tolist()
    floats = np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324])
    assert received(floats).tobytes() == floats.tobytes()
    np.save(tmp_path / "a.npy", np.arange(3))
    assert received(np.load(tmp_path / "a.npy", mmap_mode="r")).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, dtype="V4"),
        np.zeros(2, dtype=np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [8], "itemsize": 64})),
        np.zeros(2, dtype=[]),
        np.ma.masked_array([1, 2], [True, False]),
        np.array(["a", None], dtype=np.dtypes.StringDType(na_object=None)),
    ],
)
def test_arrays_that_the_codec_cannot_restore_are_refused_and_left_to_pickle(array):
    with pytest.raises(WireError, match=r"value\['x'\]: the codec does not support .*rray of dtype"):
        codec.encode({"x": array})
    foreign = []
    frames = codec.encode({"x": array}, foreign=foreign)
    assert foreign == [array] or foreign[0] is array
    assert codec.decode(frames, foreign=foreign)["x"] is array


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_torch_tensors(dtype, shape):
    tensor = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 2).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for candidate in (tensor, tensor.movedim(0, -1) if shape else tensor, tensor[..., :0] if shape else tensor):
        for back in (received(candidate), received(codec.Columns({"x": candidate}))["x"]):
            assert (back.dtype, back.shape) == (candidate.dtype, candidate.shape)
            assert torch.equal(back.to(wide), candidate.to(wide))


def test_tensors_that_are_views_or_need_gradients_arrive_as_plain_values():
    base = torch.tensor([1 + 2j, 3 - 4j])
    for tensor in (base.conj(), base.imag, base.conj().imag, torch.ones(2, requires_grad=True), torch.ones(3)[::2]):
        back = received(tensor)
        assert back.tolist() == tensor.tolist()
        assert not back.requires_grad
    assert received(torch.nn.Parameter(torch.ones(2))).tolist() == [1, 1]
    expanded = torch.ones(1).expand(1000)
    assert received(expanded).shape == (1000,)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_nested_tensors(layout, dtype):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=layout).to(dtype)
    for back in (received(nested), received(codec.Columns({"d": torch.ones(1), "x": nested}))["x"]):
        assert (back.layout, back.dtype) == (layout, dtype)
        assert deep_equal(back, nested)


def test_a_jagged_tensor_keeps_its_ragged_dimension_and_its_index_dtype():
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(20).view(4, 5), offsets, jagged_dim=2)
    back = received([nested, nested])[1]
    assert back._ragged_idx == 2
    assert back.offsets().dtype == torch.int32
    assert [row.tolist() for row in back.unbind()] == [row.tolist() for row in nested.unbind()]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.empty(2, dtype=torch.uint4),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_plain_memory_are_refused_and_left_to_pickle(make):
    tensor = make()
    for value in ({"x": [tensor]}, codec.Columns({"x": tensor})):
        with pytest.raises(WireError, match=r"value\['x'\]"):
            codec.encode(value)
        foreign = []
        codec.encode(value, foreign=foreign)
        assert foreign[0] is tensor


def test_the_codec_restores_type_and_value_of_scalars_and_containers():
    when = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC)
    value = {
        "int": [0, -1, 2**63 - 1, 2**64 - 1, 2**64, -(2**63) - 1, 10**400],
        "float": [0.1, float("inf"), -0.0],
        "text": ["", "ü\U0001f600", "\ud800"],
        "bytes": [b"", b"\x00\xff"],
        "other": [None, True, False, 1j, when, complex(float("inf"), -0.0)],
        "nested": ([], (), {}, ((1, [2, (3,)]),), [[]]),
        (1, ("a",)): {None: 1, 2.5: 2, b"k": 3, True: 4},
    }
    back = received(value)
    assert deep_equal(back, value)
    assert back["other"][4] == when


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": {1, 2}}, r"value\['a'\]: the codec does not support set"),
        ([1, {"b": (0, object())}], r"value\[1\]\['b'\]\[1\]: the codec does not support object"),
        ({("k", frozenset()): 1}, r"value\[key \('k', frozenset\(\)\)\]\[1\]: the codec does not support frozenset"),
        (datetime.datetime(2026, 1, 1), "value: the codec does not support datetime.datetime"),
        (np.array([[None, len]], dtype=object), r"value\[1\]: the codec does not support builtin_function_or_method"),
        (torch.Size([1]), "value: the codec does not support torch.Size"),
        (np.zeros(1, dtype="i4,f8")[0], "value: the codec does not support numpy.void of dtype"),
    ],
)
def test_the_error_names_the_type_and_the_path_of_an_unsupported_value(value, place):
    with pytest.raises(WireError, match=place):
        codec.encode(value)
