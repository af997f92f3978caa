import contextlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.single_controller import DataProto
from learner.ulysses import (
    UlyssesShardingManager,
    gather_heads_scatter_seq,
    gather_outputs_and_unpad,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
    replicate_kv_heads,
    slice_input_tensor,
    ulysses_pad,
    ulysses_pad_and_slice_inputs,
    validate_ulysses_config,
)
from tests.support.ranks import run_on_ranks


def rows(values: list[int]) -> DataProto:
    return DataProto.from_dict(
        tensors={"ids": torch.tensor(values)},
        non_tensors={"names": np.array([f"row {v}" for v in values], dtype=object)},
    )


def values_of(data: DataProto) -> tuple[list[int], list[str]]:
    return data.batch["ids"].tolist(), data.non_tensor_batch["names"].tolist()


def on_two_ranks() -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    manager = UlyssesShardingManager(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp")))
    whole = torch.arange(2 * 6 * 4 * 3, dtype=torch.float32).reshape(2, 6, 4, 3)  # dimensions: batch, tokens, heads, D
    mine = whole.chunk(2, dim=1)[rank].clone().requires_grad_()
    seen = {}
    with manager:
        heads = gather_seq_scatter_heads(mine.transpose(1, 2).transpose(1, 2), seq_dim=1, head_dim=2)
        seen["heads"] = torch.equal(heads, whole.chunk(2, dim=2)[rank])
        back = gather_heads_scatter_seq(heads, head_dim=2, seq_dim=1)
        seen["round trip"] = torch.equal(back, mine)
        strided = whole.chunk(2, dim=1)[rank].permute(0, 2, 1, 3)  # not contiguous
        seen["strided"] = torch.equal(
            gather_seq_scatter_heads(strided, seq_dim=2, head_dim=1), whole.chunk(2, dim=2)[rank].permute(0, 2, 1, 3)
        )
        factor = torch.arange(float(heads.numel())).reshape(heads.shape) + 1000 * rank
        (heads * factor).sum().backward()
        factors = torch.cat([torch.arange(float(heads.numel())).reshape(heads.shape) + 1000 * r for r in (0, 1)], dim=2)
        seen["gradient"] = torch.equal(mine.grad, factors.chunk(2, dim=1)[rank])
        seen["cut"] = gather_seq_scatter_heads(mine, seq_dim=1, head_dim=2, unpadded_dim_size=5).shape[1]

        ids, positions, padding = ulysses_pad_and_slice_inputs(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]]), 2)
        seen["slices"] = (ids.tolist(), positions.tolist(), padding)
        for scale in (False, True):
            part = ids[0].float().requires_grad_()
            everyone = gather_outputs_and_unpad(part, 0, unpad_dim=0, padding_size=padding, grad_scaler=scale)
            (everyone * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
            seen[f"gathered {scale}"] = (everyone.tolist(), part.grad.tolist())
        seen["rows"] = values_of(manager.preprocess_data(data=rows([rank, 10 + rank])))
        seen["own rows"] = values_of(manager.postprocess_data(data=rows([0, 1, 2, 3])))
        seen["group is set"] = get_ulysses_sequence_parallel_group() is manager.device_mesh["sp"].get_group()
        part = slice_input_tensor(torch.arange(5)[None], dim=1)
        seen["slice"] = (part.tolist(), part.is_contiguous())
        whole_positions = ulysses_pad_and_slice_inputs(
            torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]]), sp_size=2, skip_position_ids_rmpad=True
        )[1]
        seen["positions"] = whole_positions.tolist()
        with UlyssesShardingManager(None):
            seen["nested none"] = get_ulysses_sequence_parallel_world_size()
        other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "sp"))
        with contextlib.suppress(KeyError), UlyssesShardingManager(other):
            seen["nested alone"] = get_ulysses_sequence_parallel_world_size()
            seen["group is set"] &= get_ulysses_sequence_parallel_group() is other["sp"].get_group()
            seen["alone is identity"] = gather_seq_scatter_heads(mine, seq_dim=1, head_dim=2) is mine
            raise KeyError
        seen["restored"] = get_ulysses_sequence_parallel_world_size()
    seen["left"] = get_ulysses_sequence_parallel_group() is None
    return seen


@pytest.mark.long
def test_two_ranks_exchange_heads_and_tokens():
    names = ("heads", "round trip", "strided", "gradient", "left", "group is set", "alone is identity")
    for rank, seen in enumerate(run_on_ranks(2, on_two_ranks)):
        assert all(seen[name] for name in names)
        assert seen["cut"] == 5
        assert seen["slices"] == [([[5, 6]], [[0, 1]], 1), ([[7, 0]], [[2, 0]], 1)][rank]
        own = [[1.0, 10.0], [100.0, 0.0]][rank]
        assert seen["gathered False"] == ([5.0, 6.0, 7.0], own)
        assert seen["gathered True"] == ([5.0, 6.0, 7.0], [2 * value for value in own])
        assert seen["slice"] == ([[[0, 1, 2]], [[3, 4, 0]]][rank], True)
        assert seen["positions"] == [[0, 1, 2, 0]]
        assert seen["rows"] == ([0, 10, 1, 11], ["row 0", "row 10", "row 1", "row 11"])
        assert seen["own rows"] == [([0, 1], ["row 0", "row 1"]), ([2, 3], ["row 2", "row 3"])][rank]
        assert (seen["nested none"], seen["nested alone"], seen["restored"]) == (2, 1, 2)


def test_without_a_process_group_each_function_returns_its_input():
    x = torch.randn(1, 4, 6, 2)
    assert gather_seq_scatter_heads(x, seq_dim=2, head_dim=1) is x
    assert gather_heads_scatter_seq(x, head_dim=2, seq_dim=1) is x
    assert gather_outputs_and_unpad(x, gather_dim=0, unpad_dim=0, padding_size=1) is x
    manager = UlyssesShardingManager(None)
    with manager:
        data = rows([1, 2])
        assert manager.preprocess_data(data) is manager.postprocess_data(data) is data


def test_padding_tokens_have_their_own_positions():
    ids, positions = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0, 1, 0, 1, 2]])
    padded, where, count = ulysses_pad(input_ids_rmpad=ids, position_ids_rmpad=positions, sp_size=4, pad_value=1)
    assert (padded.tolist(), where.tolist(), count) == ([[5, 6, 7, 8, 9, 1, 1, 1]], [[0, 1, 0, 1, 2, 0, 1, 2]], 3)
    of_axes = ulysses_pad(ids, positions.expand(3, 1, 5), sp_size=3)[1]
    assert of_axes.tolist() == [[[0, 1, 0, 1, 2, 0]]] * 3
    assert ulysses_pad(ids)[0] is ids
    assert ulysses_pad(ids, None, 2)[1:] == (None, 1)
    with pytest.raises(ValueError, match=r"position_ids_rmpad must be .* got \(1, 4\)"):
        ulysses_pad(ids, positions[:, :4], 2)


def test_the_exchange_functions_have_the_published_signatures():
    for function, want in {
        gather_seq_scatter_heads: "x seq_dim head_dim unpadded_dim_size=0 group=None",
        gather_heads_scatter_seq: "x head_dim seq_dim group=None",
        gather_outputs_and_unpad: "x gather_dim unpad_dim=None padding_size=0 grad_scaler=True group=None",
        slice_input_tensor: "x dim padding=True group=None",
        ulysses_pad: "input_ids_rmpad position_ids_rmpad=None sp_size=1 pad_value=0",
        ulysses_pad_and_slice_inputs: (
            "input_ids_rmpad position_ids_rmpad=None sp_size=1 skip_position_ids_rmpad=False"
        ),
        validate_ulysses_config: "num_heads ulysses_sequence_size",
    }.items():
        parameters = inspect.signature(function).parameters.values()
        got = " ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
        assert got == want


def test_heads_that_cannot_be_split_are_refused():
    validate_ulysses_config(8, 4)
    with pytest.raises(ValueError, match="sp_size=4 for 6 heads"):
        validate_ulysses_config(6, 4)


@pytest.mark.parametrize(
    ("kv_heads", "heads", "sp", "want"), [(4, 8, 2, 4), (2, 8, 4, 4), (6, 12, 4, 12), (4, 12, 6, 12)]
)
def test_kv_heads_are_repeated_as_little_as_possible(kv_heads, heads, sp, want):
    repeated = replicate_kv_heads(torch.arange(kv_heads), 0, heads, sp)
    assert len(repeated) == want
    for rank in range(sp):  # each rank must have the key heads of its query heads
        keys = repeated.chunk(sp)[rank]
        queries = range(rank * heads // sp, (rank + 1) * heads // sp)
        read = keys.repeat_interleave(heads // sp // len(keys))
        assert read.tolist() == [query // (heads // kv_heads) for query in queries]
