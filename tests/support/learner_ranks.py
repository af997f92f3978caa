"""Two processes that act as learner ranks: they hold the weights of a saved model and send them to engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.core.types import Carrier, WeightOffer
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.manifest import Piece, read_manifest
from asyncrl.weights.rounds import ChannelAddress
from asyncrl.weights.stream import WeightSender
from tests.support.peers import Peer, peers


class LearnerRanks:
    """Two learner ranks. Rank 0 holds every second tensor, and rank 1 holds the other tensors.

    Attributes:
        ranks: The processes of the two ranks.
    """

    def __init__(self, ranks: list[Peer], *, num_receivers: int, timeout_s: float) -> None:
        self.ranks = ranks
        options = PublishOptions(
            carrier=Carrier.engine_stream, num_receivers=num_receivers, timeout_s=timeout_s, num_held=2
        )
        address = ranks[0].ask(_begin, 0, None, options).answer()
        ranks[1].ask(_begin, 1, address, options).answer()

    def offer(self, published: WeightOffer) -> WeightOffer:
        """Read the weights of a published folder, and offer them to engines. The folder is not needed afterwards."""
        manifest = read_manifest(published)
        parts = [list(manifest.pieces[rank::2]) for rank in range(2)]
        file = str(Path(manifest.directory, manifest.files[0]))
        for rank, part in zip(self.ranks, parts, strict=True):
            rank.ask(_hold, published.version, file, part)
        for rank in self.ranks:
            rank.answer()
        folder = Path(manifest.directory).with_name(f"held-{published.version}")
        folder.mkdir()
        manifest = replace(manifest, directory=str(folder), pieces=tuple(parts[0] + parts[1]))
        offer = manifest.offer(folder / "manifest.json", published.version)
        return self.ranks[0].ask(_offer, offer, [len(part) for part in parts]).answer()


@contextmanager
def learner_ranks(*, num_receivers: int, timeout_s: float) -> Iterator[LearnerRanks]:
    """Run the two learner processes during the ``with`` block."""
    with peers(2) as ranks:
        yield LearnerRanks(ranks, num_receivers=num_receivers, timeout_s=timeout_s)


# Functions that run in the processes


def _begin(state: dict[str, Any], rank: int, address: ChannelAddress | None, options: PublishOptions) -> ChannelAddress:
    state["sender"] = WeightSender(options, rank=rank, num_ranks=2, address=address)
    return state["sender"].address


def _hold(state: dict[str, Any], version: int, file: str, pieces: list[Piece]) -> None:
    data = torch.from_numpy(np.fromfile(file, dtype=np.uint8))
    state["sender"].hold(version, data, pieces)


def _offer(state: dict[str, Any], offer: WeightOffer, shares: list[int]) -> WeightOffer:
    return state["sender"].offer(offer, shares)
