"""From one role's scores to another role's step: which rank's results each rank of the other group needs.

Pure bookkeeping on references: the scores themselves go from worker to worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.protocol.future import DataProtoFuture

from .rows import unpack_columns
from .types import RankBatch


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a role computes of a batch, still under way.

    Attributes:
        role: Who computes it. Example: ``critic``.
        name: The column that the role's ``score`` packs. Example: ``values``.
        batches: What it was given, one a data-parallel rank.
        results: References to what it returns, one a rank; a data-parallel rank's first sp rank has its answer.
    """

    role: str
    name: str
    batches: Sequence[RankBatch]
    results: Sequence[Any]

    def needed_by(self, batches: Sequence[RankBatch]) -> list[DataProtoFuture]:
        """The scores of the groups that each data-parallel rank of another role was given.

        Args:
            batches: The same plan, shared out over any number of ranks.

        Returns:
            One future a rank, of group id to scores; it refers to the ranks alone that scored its groups.
        """
        sp_size = len(self.results) // len(self.batches)
        join = partial(unpack_columns, name=self.name)
        return [
            DataProtoFuture(
                collect_fn=join,
                futures=[
                    self.results[index * sp_size]
                    for index, scored in enumerate(self.batches)
                    if not set(scored.group_ids).isdisjoint(batch.group_ids)
                ],
            )
            for batch in batches
        ]
