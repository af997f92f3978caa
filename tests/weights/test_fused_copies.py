"""Weight loads that copy many experts at once. The model must get the same values as from its own loader."""

import contextlib
import gc

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from asyncrl.core.errors import WeightsError
from asyncrl.weights import load as load_module
from asyncrl.weights.fused_copies import FusedCopies
from asyncrl.weights.load import ComparedWrites, FileWeights, load_verified
from benchmarks.gpu_publish import writes_per_expert_tensor
from benchmarks.saved_weights import describe_model

EXPERTS, WIDTH, HIDDEN = 6, 8, 4


class Mixture(nn.Module):
    """A model with expert weights w13 [E, 2I, H] and w2 [E, H, I] as in SGLang. Each rank has a part of both.

    Args:
        ranks: Number of tensor-parallel ranks. This object is the model of the last rank.
        own: The experts of this rank.
        order: Order of the gate part and the up part in w13.
    """

    def __init__(self, *, ranks=1, own=range(EXPERTS), order=("gate", "up"), dtype=torch.float32):
        super().__init__()
        self.ranks, self.own, self.order = ranks, list(own), order
        self.part = WIDTH // ranks
        self.w13 = nn.Parameter(torch.zeros(len(self.own), 2 * self.part, HIDDEN, dtype=dtype))
        self.w2 = nn.Parameter(torch.zeros(len(self.own), HIDDEN, self.part, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=dtype))
        self.names = []

    def place(self, kind, expert):
        if kind == "down":
            return self.w2.data[expert]
        return self.w13.data[expert].chunk(2)[self.order.index(kind)]

    def part_of(self, kind, tensor):
        return tensor.narrow(int(kind == "down"), (self.ranks - 1) * self.part, self.part)

    def load_weights(self, tensors):
        self.names = []
        for name, tensor in tensors:
            self.names.append(name)
            if name == "norm":
                self.norm.data.copy_(tensor)
                continue
            _, expert, kind = name.split(".")
            if int(expert) in self.own:
                self.place(kind, self.own.index(int(expert))).copy_(self.part_of(kind, tensor))


class Interleaves(Mixture):
    """A model with alternating rows of gate and up in w13, as in GPT-OSS."""

    def place(self, kind, expert):
        if kind == "down":
            return self.w2.data[expert]
        return self.w13.data[expert].view(self.part, 2, HIDDEN)[:, self.order.index(kind)]


class Transposes(Mixture):
    """A model whose kernel needs w13 as [E, H, 2I], as in Llama 4."""

    def place(self, kind, expert):
        if kind == "down":
            return self.w2.data[expert]
        return self.w13.data[expert].view(HIDDEN, 2 * self.part).chunk(2, 1)[self.order.index(kind)].t()


class Pads(Mixture):
    """A model whose kernel needs additional rows and columns of zeros."""

    def __init__(self, **layout):
        super().__init__(**layout)
        self.w13 = nn.Parameter(torch.full((len(self.own), 2 * (self.part + 3), HIDDEN), torch.nan))
        self.w2 = nn.Parameter(torch.full((len(self.own), HIDDEN, self.part + 3), torch.nan))

    def place(self, kind, expert):
        whole = self.w2.data[expert] if kind == "down" else super().place(kind, expert)
        dim = int(kind == "down")
        whole.narrow(dim, self.part, 3).zero_()
        return whole.narrow(dim, 0, self.part)


def published(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"down": (HIDDEN, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN)}
    tensors = {
        f"experts.{expert}.{kind}": torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for expert in range(EXPERTS)
        for kind, shape in shapes.items()
    }
    return tensors | {"norm": torch.randn(HIDDEN, generator=generator).to(dtype)}


@pytest.fixture
def offer_of(tmp_path):
    """Return a function that publishes tensors.

    If the argument ``spoil`` names a tensor, the function changes the tensor's first byte after it computed the digest.
    """

    def make(tensors, spoil=None):
        folder = tmp_path / f"v{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        manifest = describe_model(str(folder), for_device=True)
        if spoil is not None:
            content = bytearray((folder / "model.safetensors").read_bytes())
            content[next(stored.start for stored in manifest.tensors if stored.name == spoil)] ^= 1
            (folder / "model.safetensors").write_bytes(content)
        return manifest.offer(folder / "manifest.json", 7)

    return make


@contextlib.contextmanager
def counted_copies(monkeypatch):
    """Yield a list. Each write into a parameter appends the parameter's name to the list."""
    counts, wrote = [], ComparedWrites._copy

    def count(self, name, target, source):
        counts.append(name)
        wrote(self, name, target, source)

    with monkeypatch.context() as patch:
        patch.setattr(ComparedWrites, "_copy", count)
        yield counts


def assert_holds(model, tensors):
    expected = type(model)(ranks=model.ranks, own=model.own, order=model.order, dtype=model.w13.dtype)
    expected.load_weights(tensors.items())
    for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(value, other), name


@pytest.fixture(params=["mapped", "device"])
def load(request, monkeypatch):
    """Return the function that loads an offer.

    The function reads the mapped file, as on a CPU, or copies of spans of the file, as on a GPU.
    """
    if request.param == "device":
        monkeypatch.setattr(
            load_module, "open_weights", lambda offer, device, timeout_s: FileWeights(offer, torch.device("cpu"))
        )
    return load_verified


@pytest.mark.parametrize(
    ("layout", "most_copies"),
    [
        pytest.param({}, 2, id="whole"),
        pytest.param({"order": ("up", "gate")}, 4, id="up-first"),
        pytest.param({"ranks": 2}, 2, id="tensor-parallel"),
        pytest.param({"own": range(1, 5)}, 2, id="expert-parallel"),
        pytest.param({"own": (0, 1, 2, 4, 5)}, 4, id="experts-with-a-gap"),
        pytest.param({"ranks": 2, "own": (3, 2, 1, 0)}, 12, id="experts-in-reverse"),
        pytest.param({"dtype": torch.bfloat16}, 2, id="bfloat16"),
        pytest.param({"kind": Interleaves}, 3, id="gate-and-up-alternate"),
        pytest.param({"kind": Interleaves, "ranks": 2}, 3, id="gate-and-up-alternate-tensor-parallel"),
        pytest.param({"kind": Transposes}, 2, id="transposed"),
        pytest.param({"kind": Pads}, 2, id="padded"),
        pytest.param({"kind": Pads, "ranks": 2, "own": range(4)}, 2, id="padded-parallel"),
    ],
)
def test_loads_after_the_first_join_the_copies_of_experts(layout, most_copies, load, offer_of, monkeypatch):
    model = {"kind": Mixture, **layout}["kind"](**{name: value for name, value in layout.items() if name != "kind"})
    dtype = model.w13.dtype
    own = {f"experts.{expert}.{kind}" for expert in model.own for kind in ("down", "gate", "up")}
    sizes = set()
    for seed in range(3):
        tensors = published(seed, dtype)
        with counted_copies(monkeypatch) as copies:
            sizes.add(load(model, offer_of(tensors)))
        assert_holds(model, tensors)
        if seed:
            assert set(model.names) == tensors.keys() - own
            assert len([name for name in copies if name != "norm"]) <= most_copies
    assert sizes == {sum(parameter.numel() for parameter in model.parameters())}


def test_padding_is_written_in_every_load(load, offer_of):
    model = Pads()
    for seed in range(3):
        load(model, offer_of(published(seed)))
        assert_holds(model, published(seed))
        for parameter in model.parameters():  # as in an engine that releases its memory
            parameter.data.fill_(torch.nan)


def test_loads_after_the_first_need_few_writes_for_a_large_mixture():
    assert writes_per_expert_tensor(num_layers=6) < 0.15


def test_copies_are_joined_within_the_spans_that_are_copied_to_a_device(offer_of, monkeypatch):
    monkeypatch.setattr(load_module, "BUCKET_BYTES", 7 * 4 * WIDTH * HIDDEN)
    monkeypatch.setattr(
        load_module, "open_weights", lambda offer, device, timeout_s: FileWeights(offer, torch.device("cpu"))
    )
    model = Mixture()
    for seed in range(3):
        load_verified(model, offer_of(published(seed)))
        assert_holds(model, published(seed))


@pytest.mark.parametrize("spoiled", ["experts.3.down", "experts.0.gate", "norm"])
def test_a_changed_byte_in_a_joined_copy_is_detected(spoiled, load, offer_of):
    model = Mixture()
    load(model, offer_of(published(0)))
    with pytest.raises(WeightsError, match=rf"1 of 19 tensors differ, first {spoiled}"):
        load(model, offer_of(published(1), spoil=spoiled))
    load(model, offer_of(published(2)))
    assert len(model.names) == 19  # after a failure, the model loads all tensors by name
    assert_holds(model, published(2))


def test_a_wrong_value_that_a_joined_copy_writes_is_detected(offer_of, monkeypatch):
    model = Mixture(ranks=2)
    load_verified(model, offer_of(published(0)))
    copy = torch.ops.aten.copy_.default

    def copy_wrongly(target, source):
        copy(target, source)
        if target.dim() > 2:
            target.view(-1)[5] += 1

    monkeypatch.setattr(load_module, "_copy", copy_wrongly)
    monkeypatch.setattr(ComparedWrites, "__torch_dispatch__", _dispatch_to(copy, copy_wrongly))
    with pytest.raises(WeightsError, match=r"of 3 parameters hold other values"):
        load_verified(model, offer_of(published(1)))


def _dispatch_to(copy, replacement):
    dispatch = ComparedWrites.__torch_dispatch__

    def dispatched(self, func, types, args=(), kwargs=None):
        return dispatch(self, replacement if func is copy else func, types, args, kwargs)

    return dispatched


class Converts(Mixture):
    """A model whose dtype differs from the dtype of the tensors."""

    def part_of(self, kind, tensor):
        return super().part_of(kind, tensor).float()


class Derives(Mixture):
    """A model whose loader also computes a value from each expert and stores this value."""

    def part_of(self, kind, tensor):
        self.derived = tensor.sum()
        return super().part_of(kind, tensor)


class ReadsParameters(Mixture):
    def load_weights(self, tensors):
        super().load_weights(tensors)
        self.scales = self.w13.abs().amax((1, 2)), self.w2.abs().amax((1, 2))


class WritesTwice(Mixture):
    def place(self, kind, expert):
        place = super().place(kind, expert)
        place.copy_(torch.ones(()).expand(place.shape))
        return place


class ClearsFirst(Mixture):
    def place(self, kind, expert):
        return super().place(kind, expert).zero_()


class Replaces(Mixture):
    """A model whose kernel needs parameters in another shape. The loader restores the original shape for each load."""

    def load_weights(self, tensors):
        for parameter, flat in ((self.w13, self.w13.data), (self.w2, self.w2.data)):
            parameter.data = flat.view(flat.shape if flat.dim() == 3 else (EXPERTS, -1, HIDDEN))
        super().load_weights(tensors)
        self.w13.data = self.w13.data.view(EXPERTS, -1)


@pytest.mark.parametrize("kind", [Converts, Derives, ReadsParameters, ClearsFirst])
def test_a_loader_that_does_more_than_copy_gets_every_expert_by_name(kind, load, offer_of):
    dtype = torch.bfloat16 if kind is Converts else torch.float32
    model = kind()
    for seed in range(3):
        tensors = published(seed, dtype)
        load(model, offer_of(tensors))
        assert {name for name in model.names if "gate" in name} == {name for name in tensors if "gate" in name}
        assert_holds(model, {name: tensor.float() for name, tensor in tensors.items()})


def test_a_parameter_that_its_loader_writes_twice_is_loaded_by_name(offer_of):
    model = WritesTwice()
    for seed in range(3):
        load_verified(model, offer_of(published(seed)))
        assert len(model.names) == 19
        assert_holds(model, published(seed))


def test_a_model_whose_loader_changes_its_parameters_is_loaded_by_name(offer_of):
    model = Replaces()
    for seed in range(3):
        load_verified(model, offer_of(published(seed)))
        assert len(model.names) == 19
        assert torch.equal(model.w13.data.view(EXPERTS, 2, WIDTH, HIDDEN)[4, 1], published(seed)["experts.4.up"])


def test_parameters_at_another_address_are_loaded_by_name_and_recorded_again(offer_of):
    model = Mixture()
    load_verified(model, offer_of(published(0)))
    model.w2.data = model.w2.data.clone()
    for seed, num_names in ((1, 19), (2, 1)):
        load_verified(model, offer_of(published(seed)))
        assert len(model.names) == num_names
        assert_holds(model, published(seed))


def test_experts_are_loaded_by_name_after_their_arrangement_changes(offer_of):
    model = Mixture()
    for seed, own, num_names in (
        (0, range(6), 19),
        (1, range(6), 1),
        (2, range(5, -1, -1), 19),
        (3, range(5, -1, -1), 1),
    ):
        model.own = list(own)
        load_verified(model, offer_of(published(seed)), arrangement=str(model.own))
        assert len(model.names) == num_names
        assert_holds(model, published(seed))


def test_with_an_unknown_arrangement_every_expert_is_loaded_by_name(offer_of):
    model = Mixture()
    for seed in range(3):
        load_verified(model, offer_of(published(seed)), arrangement=None)
        assert len(model.names) == 19


def test_tensors_with_other_shapes_than_recorded_are_loaded_by_name(offer_of):
    model = Mixture(ranks=2)
    load_verified(model, offer_of(published(0)))
    tensors = published(1)
    wide = torch.cat([tensors["experts.2.gate"], torch.full((1, HIDDEN), 9.0)])
    load_verified(model, offer_of(tensors | {"experts.2.gate": wide}))
    assert set(model.names) == {"experts.2.gate", "norm"}
    assert_holds(model, tensors)


def test_a_missing_expert_is_refused_in_a_later_load(offer_of):
    model = Mixture()
    load_verified(model, offer_of(published(0)))
    tensors = published(1)
    del tensors["experts.4.up"]
    with pytest.raises(WeightsError, match=r"not completely loaded, first w13 with 352 of 384 values"):
        load_verified(model, offer_of(tensors))


def num_recorded():
    return sum(isinstance(one, FusedCopies) for one in gc.get_objects())


def test_recorded_copies_of_a_model_are_deleted_with_the_model(offer_of):
    model = Mixture()
    load_verified(model, offer_of(published(0)))
    assert load_module.num_fused(model) == 18
    before = num_recorded()
    del model
    gc.collect()
    assert num_recorded() == before - 1
