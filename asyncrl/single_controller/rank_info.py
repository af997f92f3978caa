"""A rank's place among tensor, data, pipeline and context parallel ranks, for workers that speak of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DistRankInfo:
    """A rank's position along each axis, from 0."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass
class DistGlobalInfo:
    """Number of ranks along each axis."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int
