import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent))
from gloo import run_on_ranks

from learner.sharding import UlyssesShardingManager
from learner.ulysses import (
    gather_heads_scatter_seq,
    gather_outputs_and_unpad,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
    replicate_kv_heads,
    ulysses_pad_and_slice_inputs,
    validate_ulysses_config,
)


class Rows:
    """The two methods that a batch needs."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    @staticmethod
    def concat(parts: list["Rows"]) -> "Rows":
        return Rows([value for part in parts for value in part.values])

    def chunk(self, chunks: int) -> list["Rows"]:
        size = len(self.values) // chunks
        return [Rows(self.values[i * size : (i + 1) * size]) for i in range(chunks)]


def on_two_ranks() -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    manager = UlyssesShardingManager(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp")))
    whole = torch.arange(2 * 6 * 4 * 3, dtype=torch.float32).reshape(2, 6, 4, 3)  # batch, tokens, heads, D
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
        seen["rows"] = manager.preprocess_data(Rows([rank, 10 + rank])).values
        seen["own rows"] = manager.postprocess_data(Rows([0, 1, 2, 3])).values
        with UlyssesShardingManager(None):
            seen["nested none"] = get_ulysses_sequence_parallel_world_size()
        other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "sp"))
        with contextlib.suppress(KeyError), UlyssesShardingManager(other):
            seen["nested alone"] = get_ulysses_sequence_parallel_world_size()
            raise KeyError
        seen["restored"] = get_ulysses_sequence_parallel_world_size()
    seen["left"] = get_ulysses_sequence_parallel_group() is None
    return seen


def test_two_ranks_exchange_heads_and_tokens() -> None:
    for rank, seen in enumerate(run_on_ranks(2, on_two_ranks)):
        assert all(seen[name] for name in ("heads", "round trip", "strided", "gradient", "left"))
        assert seen["cut"] == 5
        assert seen["slices"] == [([[5, 6]], [[0, 1]], 1), ([[7, 0]], [[2, 0]], 1)][rank]
        own = [[1.0, 10.0], [100.0, 0.0]][rank]
        assert seen["gathered False"] == ([5.0, 6.0, 7.0], own)
        assert seen["gathered True"] == ([5.0, 6.0, 7.0], [2 * value for value in own])
        assert seen["rows"] == [0, 10, 1, 11]
        assert seen["own rows"] == [[0, 1], [2, 3]][rank]
        assert (seen["nested none"], seen["nested alone"], seen["restored"]) == (2, 1, 2)


def test_without_a_group_everything_is_the_identity() -> None:
    x = torch.randn(1, 4, 6, 2)
    assert gather_seq_scatter_heads(x, seq_dim=2, head_dim=1) is x
    assert gather_heads_scatter_seq(x, head_dim=2, seq_dim=1) is x
    assert gather_outputs_and_unpad(x, gather_dim=0, unpad_dim=0, padding_size=1) is x
    manager = UlyssesShardingManager(None)
    with manager:
        assert manager.preprocess_data("rows") == manager.postprocess_data("rows") == "rows"


def test_heads_that_cannot_be_split_are_refused() -> None:
    validate_ulysses_config(8, 4)
    with pytest.raises(ValueError, match="sp_size=4 for 6 heads"):
        validate_ulysses_config(6, 4)


@pytest.mark.parametrize(
    ("kv_heads", "heads", "sp", "want"), [(4, 8, 2, 4), (2, 8, 4, 4), (6, 12, 4, 12), (4, 12, 6, 12)]
)
def test_kv_heads_are_repeated_as_little_as_can_be(kv_heads: int, heads: int, sp: int, want: int) -> None:
    repeated = replicate_kv_heads(torch.arange(kv_heads), 0, heads, sp)
    assert len(repeated) == want
    for rank in range(sp):  # each query head still finds its key head, at its place within the rank
        keys = repeated.chunk(sp)[rank]
        queries = range(rank * heads // sp, (rank + 1) * heads // sp)
        read = keys.repeat_interleave(heads // sp // len(keys))
        assert read.tolist() == [query // (heads // kv_heads) for query in queries]
