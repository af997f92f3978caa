"""What the workers of all roles share: their place in the mesh, planned groups, modes, checkpoints and their end.

A role has two faces. Verl's methods (``compute_values``, ``update_critic``, …) take a `DataProto` that the caller
holds, and the caller waits for the result. A run's own methods (``score``, ``step``) take a list of `RankBatch`, one a
data-parallel rank: each rank fetches its prompt groups from the buffer, the caller waits for nothing, and what one role
scored goes to another from worker to worker, or stays in the process that both share.

A worker waits for nothing on its own: the controller's calls wake it. Fetching waits for the buffer under the client's
deadline, collectives wait for the other ranks under the process group's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch.distributed as dist

from asyncrl.protocol.data_proto import DataProto
from asyncrl.protocol.ports import TrajectorySource
from asyncrl.protocol.trajectory import TrajectoryGroup
from asyncrl.protocol.types import WeightSnapshot
from asyncrl.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register

from .checkpoint import Checkpointer
from .checkpoint_files import read_progress
from .config import AlgorithmConfig, LearnerConfig
from .critic import CriticTrainer
from .offload import Residence
from .optimizer import PolicyOptimizer
from .rows import group_columns, pack_columns, sequence_columns
from .scorer import PackedScorer
from .trainer import PolicyTrainer
from .types import RankBatch, TokenSequence, group_sequences

ScorerT = TypeVar("ScorerT", bound=PackedScorer[Any])
_MESH = "dp"

BY_ROWS = make_nd_compute_dataproto_dispatch_fn(_MESH)
"""Dispatch of verl's methods: each data-parallel rank gets its part of the rows, its sp ranks the same part."""


def _share_of_each_rank(group: Any, *shares: Sequence[Any], **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give all sp ranks of a data-parallel rank its shares; ranks are laid out dp-major."""
    sizes = {len(share) for share in shares}
    num_shares = sizes.pop() if len(sizes) == 1 else 0
    if num_shares == 0 or group.world_size % num_shares:
        raise ValueError(
            f"arguments must be lists of one entry a data-parallel rank, got {[len(share) for share in shares]} "
            f"entries for {group.world_size} ranks"
        )
    sp_size = group.world_size // num_shares
    spread = tuple([entry for entry in share for _ in range(sp_size)] for share in shares)
    return spread, {name: [value] * group.world_size for name, value in options.items()}


def _all_results(_group: Any, results: Any) -> Any:
    return results


PER_DP_RANK = {"dispatch_fn": _share_of_each_rank, "collect_fn": _all_results}
"""Dispatch of a run's methods: lists of one entry a data-parallel rank; options by name go to everyone."""


class RoleWorker(Worker, Generic[ScorerT]):
    """One rank of a role. Every method is called on all ranks together.

    Args:
        config: Options of the group that the role runs in; ``num_ranks`` is that of its pool.
        algorithm: What is optimised.
        model_path: Directory in Hugging Face layout.
        connect_buffer: Opens this rank's connection to the replay buffer; None where only verl's methods are called.
    """

    role: str
    """Name of the role, under which workers that share a process find one another."""

    def __init__(
        self,
        config: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        model_path: str,
        connect_buffer: Callable[[], TrajectorySource] | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        self._algorithm = algorithm
        self._model_path = model_path
        self._connect_buffer = connect_buffer
        self._source: TrajectorySource | None = None
        self._checkpoints: dict[str, Checkpointer] = {}
        self._fetched: tuple[tuple[int, tuple[int, ...]], list[TrajectoryGroup]] | None = None
        self._stopped = False
        self._scored: tuple[int, dict[int, np.ndarray]] | None = None
        dp_rank, sp_rank = divmod(self.rank, config.sp_size)
        self._register_dispatch_collect_info(_MESH, dp_rank=dp_rank, is_collect=sp_rank == 0)

    def _start(self, scorer: ScorerT, optimizer: PolicyOptimizer | None = None) -> None:
        """Take the loaded model and connect to the buffer."""
        self._scorer = scorer
        self._residence = Residence(self._config, [scorer.model], optimizer)
        # One rank of a sequence-parallel group fetches; the others get the groups from it.
        if self._connect_buffer is not None and scorer.mesh.sp_rank == 0:
            self._source = self._connect_buffer()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rollout_mode(self, version: int) -> WeightSnapshot | None:
        """Hand the devices over to colocated engines: offload if the options say so.

        Args:
            version: Learner steps contained in the policy's weights.

        Returns:
            The published weights where the role has some to publish.
        """
        self._residence.enter_rollout()
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def trainer_mode(self) -> None:
        """Take the devices back from colocated engines: what `rollout_mode` moved away returns."""
        self._residence.enter_training()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(
        self, directory: str, version: int = 0, wait: bool = True, run: Mapping[str, Any] | None = None
    ) -> str:
        """Save model, optimizer, schedule position and random state.

        Args:
            directory: Holds the checkpoints of this role.
            version: Learner steps contained in the weights.
            wait: Return when the checkpoint is whole; otherwise it is written while training goes on.
            run: What the controller needs to go on, as plain values.

        Returns:
            Where the checkpoint is, or will be.

        Raises:
            ValueError: the role is frozen.
        """
        checkpoints = self._checkpoints_in(directory)
        with self._residence.persisting():
            return str(checkpoints.save(version, wait=wait, role=self._role_state(), run=run))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, directory: str) -> int | None:
        """Restore the newest whole checkpoint.

        Args:
            directory: Holds checkpoints, or is one itself.

        Returns:
            The policy version in it; None when there is no checkpoint, and nothing changed.
        """
        checkpoints = self._checkpoints_in(directory)
        newest = checkpoints.latest()
        if newest is None:
            return None
        with self._residence.persisting():
            version = checkpoints.load(newest)
        self._take_role_state(read_progress(newest).role)
        return version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def stop(self) -> None:
        """Finish a checkpoint in the background, leave the group and close the connection to the buffer."""
        for checkpoints in self._checkpoints.values():
            checkpoints.finish()
        if self._source is not None:
            self._source.close()
        self._stopped = True
        sharing = [worker for worker in self.fused_worker_dict.values() if isinstance(worker, RoleWorker)]
        if dist.is_initialized() and all(worker._stopped for worker in sharing):
            dist.destroy_process_group()

    @property
    def _model_offloaded(self) -> bool:
        return self._residence.model_offloaded

    @property
    def _optimizer_offloaded(self) -> bool:
        return self._residence.optimizer_offloaded

    def _role_state(self) -> dict[str, Any]:
        """What goes into a checkpoint beside the model, as plain values."""
        return {}

    def _take_role_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `_role_state` gave."""

    def _checkpoints_in(self, directory: str) -> Checkpointer:
        if directory not in self._checkpoints:
            trainer = self._scorer
            if not isinstance(trainer, PolicyTrainer | CriticTrainer):
                raise ValueError(f"role {self.role!r} is frozen: it has no checkpoints; its model stays where it was")
            self._checkpoints[directory] = Checkpointer(trainer, directory, keep=self._config.keep_checkpoints)
        return self._checkpoints[directory]

    def _fetch(self, batch: RankBatch) -> list[TrajectoryGroup]:
        """Get the groups of a batch: those of a role in the same process, else over one connection a sp group."""
        wanted = (batch.version, batch.group_ids)
        for worker in (self, *self.fused_worker_dict.values()):
            if isinstance(worker, RoleWorker) and worker._fetched is not None and worker._fetched[0] == wanted:
                return worker._fetched[1]
        groups = self._source.fetch(batch.group_ids) if self._source is not None and batch.group_ids else []
        mesh = self._scorer.mesh
        if mesh.sp_size > 1:
            shared: list[Any] = [groups]
            dist.broadcast_object_list(shared, group_src=0, group=mesh.sp_group)
            groups = shared[0]
        self._fetched = (wanted, groups)
        return groups

    def _sequences(self, batch: RankBatch) -> list[TokenSequence]:
        """The sequences of a batch, prompt groups one after another, each with its samples in order."""
        groups = self._fetch(batch)
        advantages = batch.advantages or [None] * len(groups)
        return [
            sequence
            for group, own, mini_batch in zip(groups, advantages, batch.mini_batches, strict=True)
            for sequence in group_sequences(
                group, own, mini_batch=mini_batch, mask_truncated=self._algorithm.mask_truncated
            )
        ]

    def _keep(self, batch: RankBatch, values: Sequence[np.ndarray], name: str, *, send: bool) -> DataProto | None:
        """Keep what this role scored for roles in the same process, and pack it for the others if it is sent.

        Args:
            batch: What was scored.
            values: [T] float32 a sequence, in the order of `_sequences`.
            name: Name of the column.
            send: Return it, on the first sp rank; otherwise return nothing.
        """
        groups = self._fetch(batch)
        columns = group_columns(groups, values)
        self._scored = (batch.version, columns)
        return pack_columns(columns, name) if send and self._scorer.mesh.sp_rank == 0 else None

    def _with_scores(
        self,
        batch: RankBatch,
        sequences: Sequence[TokenSequence],
        name: str,
        sent: Mapping[int, np.ndarray] | None,
        role: str,
    ) -> list[TokenSequence]:
        """The sequences with a column that another role scored.

        Args:
            batch: What was scored.
            sequences: Those of `_sequences`.
            name: Name of the column.
            sent: What came with the call, by group id; None takes what the role kept in this process.
            role: Who scored.

        Raises:
            ValueError: nothing came with the call, and there is no such role in this process that scored the batch.
        """
        if sent is None:
            worker = self if role == self.role else self.get_fused_worker_by_name(role)
            scored = worker._scored if isinstance(worker, RoleWorker) else None
            if scored is None or scored[0] != batch.version:
                raise ValueError(
                    f"role {self.role!r} needs {name} of role {role!r} for version {batch.version}, got none; call "
                    f"{role}.score first, and pass on what it returns where the two do not share a process"
                )
            sent = scored[1]
        columns = sequence_columns(self._fetch(batch), sent)
        return [sequence.with_column(name, column) for sequence, column in zip(sequences, columns, strict=True)]
