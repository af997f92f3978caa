"""Prepares the batch of the next learner step while a rank computes the current step.

A thread fetches the batch's prompt groups from the replay buffer, and packs their sequences. Each process has one
`BatchPreparer` with one thread, for all its roles (such as actor and critic). The way of one batch is:

1. `BatchPreparer.announce`: the controller announces the batch when it queues the learner step.
2. The thread prepares the batch when a step has taken the previous batch, so a process holds the batches of at most two
   steps. `RoleBatches.prepare` fetches the groups that the process does not have yet (`StepGroups.fetch`), makes one
   sequence per branch, and packs the sequences.
3. `BatchPreparer.take`: the step waits until the thread has prepared the batch. If a rank lacks a group, all ranks skip
   the batch.

Each wait of the thread ends at the latest at the deadline of the buffer's client or of the process group. The thread
uses separate process groups (`LearnerMesh.on_host`) for its collectives. All ranks must announce and take the same
batches in the same order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from asyncrl.core import record
from asyncrl.core.errors import BatchLost, DeadlineError, UnknownGroup
from asyncrl.core.ports import LearnerBuffer
from asyncrl.core.record import SpanKind
from asyncrl.core.trajectory import TrajectoryGroup

from .config import AlgorithmConfig, LearnerConfig
from .roles import ACTOR, Role, scored_by
from .types import RankBatch, TokenSequence, group_sequences

if TYPE_CHECKING:
    from .fsdp import LearnerMesh
    from .packed_model import PackedBatch, PackedModel
    from .trainer import LearnerStep, PackedStep

logger = logging.getLogger(__name__)

_GROUP_FIELDS = tuple(field.name for field in fields(TrajectoryGroup))
_Key = tuple[int, str, tuple[tuple[int, tuple[int, ...], int], ...]]


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """The samples of a learner step for one rank and role, fetched and packed.

    Attributes:
        groups: The prompt groups of the batch that were found, by id.
        lost: Ids of the step's groups that this process did not find in the buffer.
        most_lost: The largest number of lost groups on one rank. If it is not 0, ``sequences``, ``scored`` and ``step``
            are empty.
        sequences: The sequences of the batch, without the columns that roles compute, such as ``values``.
        scored: The sequences packed for `PackedModel.scores`; None if the role scores nothing for other roles.
        step: The sequences packed for a learner step; None for a frozen role.
        seconds: Time to prepare the batch, in seconds.
    """

    groups: dict[int, TrajectoryGroup]
    lost: frozenset[int]
    most_lost: int
    sequences: list[TokenSequence] = field(default_factory=list)
    scored: PackedBatch | None = None
    step: PackedStep | None = None
    seconds: float = 0.0


class BatchPreparer:
    """Prepares batches in one thread. The methods are thread-safe.

    Announced batches are prepared in the order of their announcements. A batch that is taken without an announcement is
    prepared after the announced batches of its version and of earlier versions.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._newest: int | None = None  # version of the newest batch that a step has taken
        self._announced: deque[tuple[_Key, RoleBatches, RankBatch]] = deque()
        self._prepared: dict[_Key, Future[PreparedBatch]] = {}
        self._groups: dict[int, StepGroups] = {}
        self._lost: set[int] = set()
        self._most_lost = 0

    def announce(self, role: RoleBatches, batch: RankBatch) -> None:
        """Queue a role's batch. The thread prepares the first batch immediately.

        The thread prepares a later batch when a role calls `take` for the previous learner step.
        """
        with self._lock:
            self._announced.append((_key(role, batch), role, batch))
            if self._newest is None:
                self._newest = batch.version - 1
            self._submit_due(self._newest + 1)

    def take(self, role: RoleBatches, batch: RankBatch) -> PreparedBatch:
        """Return the prepared batch of a role, and drop the batches of earlier steps.

        Waits until the thread has prepared the batch. If the batch was not announced, the thread prepares it now.

        Raises:
            BatchLost: on all ranks, if a rank needs a group that the buffer does not have. Later calls raise this error
                too, until `forget`.
        """
        key, version = _key(role, batch), batch.version
        with record.span(SpanKind.fetch, step=version):
            with self._lock:
                self._newest = version
                self._prepared = {known: future for known, future in self._prepared.items() if known[0] >= version}
                self._groups = {known: groups for known, groups in self._groups.items() if known >= version}
                self._submit_due(version)
                self._submit(key, role, batch)
                self._submit_due(version + 1)
                future = self._prepared[key]
            prepared = future.result()
        self._lost |= prepared.lost
        self._most_lost = max(self._most_lost, prepared.most_lost)
        if self._most_lost:
            raise BatchLost(
                f"the batch of step {version} is lost: rank {role.mesh.rank} of {role.role.name!r} did not find "
                f"{len(self._lost)} of its {len(batch.group_ids)} groups in the buffer; the largest number of missing "
                f"groups on one rank is {self._most_lost}"
            )
        return prepared

    def forget(self) -> list[int]:
        """Drop all prepared and announced batches. If the thread is preparing a batch, it finishes this batch.

        All ranks must call `announce`, `take` and `forget` in the same order. Returns the ids of the groups that this
        process did not find in the buffer, ascending. Later calls of `take` no longer raise `BatchLost` because of
        these groups.
        """
        with self._lock:
            lost = sorted(self._lost)
            self._begin()
        return lost

    def close(self) -> None:
        """End the thread. If it is preparing a batch, wait for this batch; do not prepare the other queued batches."""
        self._thread.shutdown(cancel_futures=True)

    def _submit_due(self, newest: int) -> None:
        while self._announced and self._announced[0][0][0] <= newest:
            self._submit(*self._announced.popleft())

    def _submit(self, key: _Key, role: RoleBatches, batch: RankBatch) -> None:
        if key not in self._prepared and (self._newest is None or key[0] >= self._newest):
            groups = self._groups.setdefault(key[0], StepGroups())
            self._prepared[key] = self._thread.submit(role.prepare, batch, groups)


def _key(role: RoleBatches, batch: RankBatch) -> _Key:
    """Return the key of a prepared batch: version, role and samples. The rewards do not affect the prepared batch."""
    return batch.version, role.role.name, tuple((each.group_id, each.samples, each.mini_batch) for each in batch.shares)


@dataclass(frozen=True, kw_only=True)
class RoleBatches:
    """Fetches and packs the batches of one role on one rank.

    Attributes:
        role: The role, such as actor or critic.
        config: The role's options.
        algorithm: Options of the algorithm.
        model: The role's model.
        step: Makes the role's learner steps; None for a frozen role.
        measured_steps: Number of learner steps at the start of the run that only compute metrics.
        mesh: The mesh on the host (`LearnerMesh.on_host`), for the collectives of the thread.
        buffer: The replay buffer; None on ranks that get the groups from another rank of their sp group.
    """

    role: Role
    config: LearnerConfig
    algorithm: AlgorithmConfig
    model: PackedModel
    step: LearnerStep | None
    measured_steps: int
    mesh: LearnerMesh
    buffer: LearnerBuffer | None

    def prepare(self, batch: RankBatch, groups: StepGroups) -> PreparedBatch:
        """Fetch the groups of a batch that ``groups`` does not have yet, and pack the batch for the role's calls.

        ``groups`` are the groups of the batch's step that the process has fetched so far. If a rank lacks a group, no
        rank packs its batch.
        """
        import torch

        started_at = time.monotonic()
        with record.span(SpanKind.prepare, lane="/prepare", step=batch.version, cause=self.role.name):
            groups.fetch(batch, self.mesh, self.buffer)
            found = {group_id: groups.found[group_id] for group_id in batch.group_ids if group_id in groups.found}
            most_lost = int(self.mesh.largest(torch.tensor(len(groups.lost))))
            own = PreparedBatch(groups=found, lost=frozenset(groups.lost), most_lost=most_lost)
            if not most_lost:
                own = self._packed(batch, own)
        return replace(own, seconds=time.monotonic() - started_at)

    def _packed(self, batch: RankBatch, own: PreparedBatch) -> PreparedBatch:
        import torch

        sequences = [
            sequence
            for share in batch.shares
            for sequence in group_sequences(
                own.groups[share.group_id],
                samples=share.samples,
                mini_batch=share.mini_batch,
                mask_truncated=self.algorithm.mask_truncated,
                all_columns=self.algorithm.has_own_loss,
                version=batch.version,
            )
        ]
        scored = self.model.pack(sequences, mesh=self.mesh) if self._is_scored else None
        step = None
        if self.step is not None:
            step = self.step.pack(sequences, self.mesh, is_measured=batch.version < self.measured_steps)
        if self.model.mesh.device.type == "cuda":
            torch.cuda.set_device(self.model.mesh.device)  # torch locks memory pages for the thread's current GPU
            scored, step = (packed and packed.pinned() for packed in (scored, step))
        return replace(own, sequences=sequences, scored=scored, step=step)

    @property
    def _is_scored(self) -> bool:
        """True if the run calls `ModelWorker.score` or `ModelWorker.rewards` of this role for each batch."""
        if self.role is not ACTOR:
            return True
        return self.algorithm.needs_reference and scored_by(self.role.column, self.config) is ACTOR


@dataclass(frozen=True)
class StepGroups:
    """The prompt groups of a step that a process has fetched for its roles. Only the preparing thread uses this object.

    Attributes:
        found: The fetched groups by id.
        lost: Ids of the groups that the buffer did not have.
    """

    found: dict[int, TrajectoryGroup] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    def fetch(self, batch: RankBatch, mesh: LearnerMesh, buffer: LearnerBuffer | None) -> None:
        """Fetch the groups of a batch that are not in ``found`` yet.

        All ranks of a sequence-parallel (sp) group call this method together. One of these ranks fetches the prompt
        groups that any rank of the sp group lacks, and sends them to the other ranks. The other ranks pass None as
        ``buffer``.
        """
        is_missing = [group_id not in self.found for group_id in batch.group_ids]
        if mesh.sp_size > 1 and is_missing:
            is_missing = mesh.any_in_sp_group(is_missing)
        missing = [group_id for group_id, absent in zip(batch.group_ids, is_missing, strict=True) if absent]
        if not missing:
            return
        with record.span(SpanKind.fetch, lane="/prepare", step=batch.version):
            groups = _found(buffer, missing) if buffer is not None else []
            if mesh.sp_size > 1:
                from asyncrl.single_controller.serialization import broadcast_value

                columns = [{name: getattr(group, name) for name in _GROUP_FIELDS} for group in groups]
                groups = [TrajectoryGroup(**group) for group in broadcast_value(columns, mesh.sp_group)]
        self.found.update((group.group_id, group) for group in groups)
        self.lost.update(set(missing).difference(self.found))


def _found(buffer: LearnerBuffer, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    """Return the groups of ``group_ids`` that the buffer has.

    After a `DeadlineError`, this function retries once. By then, the buffer has possibly noticed a dead store server.
    """
    with suppress(UnknownGroup):
        try:
            return buffer.fetch(group_ids)
        except DeadlineError as late:
            logger.warning("the fetch from the buffer timed out and is repeated: %s", late)
            return buffer.fetch(group_ids)
    found: list[TrajectoryGroup] = []
    for group_id in group_ids:
        with suppress(UnknownGroup):
            found += buffer.fetch([group_id])
    return found
