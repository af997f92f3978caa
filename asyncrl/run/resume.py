"""The state of a run at a checkpoint, and how a run continues from it.

A checkpoint of policy version v accounts for the steps before v. A resumed run hands out again all prompts that were
queued, in flight or stored at that moment. The tokens written for them count as dropped (``resume``).

A run also returns to a checkpoint when its learner dies (`asyncrl.run.learner_restarts`). Its buffer stays up and
queues the prompts that it still knows. Their tokens count as dropped (``rewound``).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.core.errors import CheckpointError
from asyncrl.core.ports import ControlBuffer, FleetPort, LearnerPort, PromptSource
from asyncrl.core.types import BufferStats, Plan, Prompt
from asyncrl.data.prompts import PromptStream
from buffer.config import BufferConfig, Durability
from buffer.keys import BufferRole, client_keys, server_keys
from learner.checkpoint_folder import missing_parts, newest_checkpoint, read_progress, whole_checkpoints

RESUME = "resume"
"""Why tokens of unfinished groups are dropped when a run resumes."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run, summed over all resumes.

    Attributes:
        version: Learner version: the number of committed steps.
        prompts: State of the prompt stream; its ``position`` counts the prompts handed out.
        finished: Ids of the consumed or dropped groups, as sorted ranges [start, end).
        tokens_generated: Policy tokens that the fleet had written.
        tokens_trained: Policy tokens of consumed groups.
        tokens_dropped: Policy tokens dropped, by reason.
        lag_histogram: Number of consumed groups by lag in learner steps.
        options: The options in `learning_options` as the checkpoint's run had them.
    """

    version: int = 0
    prompts: Mapping[str, Any] = field(default_factory=dict)
    finished: Sequence[tuple[int, int]] = ()
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_dropped: Mapping[str, int] = field(default_factory=dict)
    lag_histogram: Mapping[int, int] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def unfinished(self) -> list[int]:
        """Ids of groups that were handed out and are not finished, ascending."""
        gaps, start = [], 0
        for first, end in [*self.finished, (self.prompts.get("position", 0),) * 2]:
            gaps.extend(range(start, first))
            start = end
        return gaps

    def since(self, before: RunState) -> RunState:
        """This state, but with trained tokens and lags only since ``before``."""
        lags = Counter(self.lag_histogram)
        lags.subtract(before.lag_histogram)
        return replace(
            self,
            tokens_trained=self.tokens_trained - before.tokens_trained,
            lag_histogram={k: n for k, n in lags.items() if n},
        )

    @property
    def tokens_lost(self) -> int:
        """Policy tokens that were buffered or in flight; a resumed run drops them."""
        return self.tokens_generated - self.tokens_trained - sum(self.tokens_dropped.values())

    def all_dropped(self) -> dict[str, int]:
        """Dropped tokens by reason, including those that resuming drops."""
        lost = {RESUME: self.tokens_lost} if self.tokens_lost else {}
        return dict(Counter(self.tokens_dropped) + Counter(lost))

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunState:
        """The inverse of `to_dict`. Raises `ValueError` if the values are not the state of a run."""
        names = sorted(cls.__dataclass_fields__)
        if sorted(values) != names:
            raise ValueError(
                f"a checkpoint to resume must hold {names} of its run, got {sorted(values)}; it was saved by "
                "another version of asyncrl, or not by a run"
            )
        lags = {int(lag): count for lag, count in values["lag_histogram"].items()}
        finished = tuple((first, end) for first, end in values["finished"])
        return cls(**{**values, "finished": finished, "lag_histogram": lags})

    def changed_options(self, config: RunConfig) -> list[str]:
        """Options that differ from the checkpoint's. Example: ``learner.optimizer.lr was 0.001, is 0.0001``."""
        now = learning_options(config)
        return [f"{name} was {was}, is {now[name]}" for name, was in self.options.items() if now.get(name, was) != was]

    def after(
        self,
        *,
        prompts: Mapping[str, Any],
        stats: BufferStats,
        finished: Iterable[tuple[int, int]],
        planned: Iterable[Plan],
        tokens_generated: int,
        version: int,
        options: Mapping[str, str],
    ) -> RunState:
        """The state at the checkpoint of ``version`` of a run that resumed from this state.

        ``stats``, ``finished`` and ``tokens_generated`` count only from the resume on. ``planned`` are the batches
        before ``version``; batches that the ledger had not committed at ``stats`` are added.
        """
        open_plans = [plan for plan in planned if plan.version >= stats.learner_version]
        groups = [group for plan in open_plans for group in plan.groups]
        ids = [(group.group_id, group.group_id + 1) for plan in planned for group in plan.groups]
        lags = Counter(plan.version - group.oldest_version for plan in open_plans for group in plan.groups)
        return RunState(
            version=version,
            prompts=prompts,
            finished=_joined([*self.finished, *finished, *ids]),
            tokens_generated=self.tokens_generated + tokens_generated,
            tokens_trained=self.tokens_trained + stats.tokens_trained + sum(group.num_tokens for group in groups),
            tokens_dropped=dict(Counter(self.all_dropped()) + Counter(stats.tokens_dropped)),
            lag_histogram=dict(Counter(self.lag_histogram) + Counter(stats.lag_histogram) + lags),
            options=options,
        )


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted, disjoint ranges. Example: [(2, 3), (0, 2), (5, 6)] gives ((0, 3), (5, 6))."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return tuple(found)


def learning_options(config: RunConfig) -> dict[str, str]:
    """The options that influence learning, by dotted name, as text."""
    critic = config.learner.critic
    sections = {
        "model": config.model,
        "algorithm": config.algorithm,
        "learner.optimizer": config.learner.optimizer,
        "learner.critic": replace(critic, **dict.fromkeys(critic.own)),  # without its layout
        "learner.lora": config.learner.lora,
        "rollout_fleet.sampling": config.rollout_fleet.sampling,
    }
    found = {f"{name}.{key}": str(value) for name, part in sections.items() for key, value in asdict(part).items()}
    buffer = {f"buffer.{key}": str(getattr(config.buffer, key)) for key in ("max_lag", "on_stale", "order", "filters")}
    fleet = config.rollout_fleet
    more = [part for part in (fleet.rewards_by_source, fleet.reward_options) if part]
    return found | buffer | {"rollout_fleet.reward": " ".join(map(str, [fleet.reward_weights, *more]))}


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A checkpoint's folder, and the state of the run there."""

    checkpoint: Path
    state: RunState


class Checkpointer:
    """Saves the due checkpoints of a run.

    A save is queued on the ranks directly after the update that makes the version.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        buffer: ControlBuffer,
        learner: LearnerPort,
        fleet: FleetPort,
        prompts: PromptSource,
        resumed: RunState,
    ) -> None:
        self._config = config
        self._buffer = buffer
        self._learner = learner
        self._fleet = fleet
        self._prompts = prompts
        self._resumed = resumed
        self._uncommitted: dict[int, Plan] = {}
        self._queued: dict[int, RunState] = {}
        self._requests: list[asyncio.Future[Path]] = []
        self._copied: list[tuple[Path, list[asyncio.Future[Path]]]] = []

    def planned(self, plan: Plan) -> None:
        """Record a planned batch."""
        self._uncommitted[plan.version] = plan

    def committed(self, version: int) -> None:
        """Record that the ledger committed the batch of ``version``."""
        del self._uncommitted[version]
        self._answer_requests()

    async def requested(self) -> Path:
        """Save a checkpoint with the next learner step; returns its folder when it is whole.

        The ranks write it while they train. This call returns with the first commit after that. Raises
        `CheckpointError` if the ranks are not known to share the folder.
        """
        if not self._config.shares_checkpoints:
            raise CheckpointError(
                "a run on several nodes saves checkpoints in a folder that all nodes share; start it with "
                "checkpoint.directory"
            )
        request: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._requests.append(request)
        return await request

    def _answer_requests(self) -> None:
        for copied in list(self._copied):
            folder, requests = copied
            if folder.is_dir() and not missing_parts(folder):
                self._copied.remove(copied)
                for request in requests:
                    if not request.done():  # its client has gone
                        request.set_result(folder)

    async def save_if_due(self, version: int) -> Awaitable[str] | None:
        """Queue a checkpoint of ``version`` on the ranks if one is due. Its result is the written folder."""
        is_last, every = version == self._config.total_steps, self._config.checkpoint.every_steps
        is_due = bool(self._requests) or (every > 0 and (version % every == 0 or is_last))
        return await self.save(version, wait=is_last) if is_due else None

    async def save(self, version: int, *, wait: bool) -> Awaitable[str]:
        """Queue a checkpoint of ``version``, which the ranks are at after the calls queued so far."""
        planned = list(self._uncommitted.values())
        stats = await self._buffer.stats()
        state = self._queued[version] = self._resumed.after(
            prompts=self._prompts.state(),
            stats=stats,
            finished=await self._buffer.finished(),
            planned=planned,
            tokens_generated=(await self._fleet.counters()).tokens_generated,
            version=version,
            options=learning_options(self._config),
        )
        requests, self._requests = self._requests, []
        return self._copied_by(self._learner.save(version, state.to_dict(), wait=wait), requests)

    async def _copied_by(self, saving: Awaitable[str], requests: list[asyncio.Future[Path]]) -> str:
        """The folder of a checkpoint, when the ranks have copied their part."""
        folder = await saving
        if requests:
            self._copied.append((Path(folder), requests))
        self._answer_requests()
        return folder

    def newest(self, folder: Path) -> Resumed | None:
        """The newest complete checkpoint in ``folder`` that this process has saved, or None.

        Other runs may save into the same folder.
        """
        for path in reversed(whole_checkpoints(folder)):
            if (state := self._queued.get(int(path.name[1:]))) is None:
                continue
            with suppress(ValueError):
                saved, own = read_progress(path).run, json.loads(json.dumps(state.to_dict()))
                if RunState.from_dict(saved) == RunState.from_dict(own):
                    return Resumed(checkpoint=path, state=state)
        return None

    def rewind(self, version: int) -> None:
        """Forget planned batches and later checkpoints; the learner continues at ``version``."""
        self._uncommitted.clear()
        self._queued = {saved: state for saved, state in self._queued.items() if saved <= version}


def find_checkpoint(config: RunConfig) -> Resumed | None:
    """The checkpoint that ``checkpoint.resume`` names; None for ``never``, and for ``auto`` without any checkpoint.

    Raises `ValueError` if the path holds no checkpoint, or if the checkpoint is already at the run's last step.
    """
    choice = config.checkpoint.resume
    if choice == "never":
        return None
    path: Path | None = Path(choice)
    if choice == "auto":
        own, runs = config.checkpoint.directory, Path(config.output_dir, config.experiment).resolve().glob("*")
        by_time = sorted(runs, key=lambda run: run.name, reverse=True)
        folders = [Path(own).resolve()] if own else [run / "checkpoints" for run in by_time]
        path = next(filter(None, map(newest_checkpoint, folders)), None)
    elif (newest := newest_checkpoint(path)) is not None:
        path = newest
    if path is None:
        return None
    progress = read_progress(path)
    if progress.version >= config.total_steps:
        raise ValueError(
            f"total_steps must be above the {progress.version} steps of {path} to resume it, got "
            f"{config.total_steps}; raise it, or set checkpoint.resume=never"
        )
    return Resumed(checkpoint=path, state=RunState.from_dict(progress.run))


def check_beginning(config: RunConfig) -> None:
    """Check a run's checkpoint, keys and buffer folder before anything starts.

    Raises `ValueError` as `find_checkpoint` and `check_keys` do, or if the buffer's folder holds another run's journal.
    """
    if config.buffer.keys:
        check_keys(Path(config.buffer.keys))
    if find_checkpoint(config) is not None or config.buffer.durability is not Durability.disk:
        return
    folder = Path(config.buffer.directory)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"buffer.directory={folder} must be empty for a run that does not resume, got files of another run; name "
            "an empty directory, remove this one, or continue from a checkpoint with checkpoint.resume=auto"
        )


def check_keys(folder: Path) -> None:
    """Raise `ValueError` if the keys are of different runs: the server would refuse such clients without an answer."""
    if not (folder / "server.json").is_file():
        return
    server = server_keys(folder)
    for role, public in server.role_publics.items():
        keys = client_keys(folder, BufferRole(role))
        if (server.public, public) != (keys.server_public, keys.public):
            raise ValueError(
                f"buffer.keys={folder} must hold the keys of one run, got a server.json and a {role}.json of different "
                "runs; remove the folder to have new ones made, or name another one"
            )


def begin_buffer_at(options: BufferConfig, version: int) -> BufferConfig:
    """The buffer's options of a resumed run: the buffer begins empty, at the checkpoint's version.

    The journal of an earlier server is newer than the checkpoint. Its folder is renamed, not deleted.
    """
    kept = Path(options.directory)
    if options.durability is Durability.disk and kept.is_dir():
        kept.rename(kept.with_name(f"{kept.name}.before-resume-{time.strftime('%Y%m%d-%H%M%S')}"))
    return replace(options, first_version=version)


class RepeatedPrompts:
    """A run's prompts: first the unfinished prompts of ``resumed``, then the next prompts of the stream.

    Args:
        stream: The prompt stream.
        resumed: The state to resume from: the stream continues there, and unfinished prompts are handed out again.

    Raises `ValueError` if the stream has other files or options than that of ``resumed``.
    """

    def __init__(self, stream: PromptStream, resumed: RunState | None = None) -> None:
        self._stream = stream
        self._again: list[int] = []
        if resumed is not None:
            stream.restore(resumed.prompts)
            self.repeat_unfinished(resumed.finished)

    def repeat_unfinished(self, finished: Sequence[tuple[int, int]]) -> None:
        """Hand out again every prompt that is not ``finished``. The buffer skips prompts that it has already."""
        self._again = RunState(prompts=self._stream.state(), finished=finished).unfinished

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        again, self._again = self._again[:count], self._again[count:]
        return [*self._stream.at(again), *self._stream.take(count - len(again))]

    def state(self) -> Mapping[str, Any]:
        """The state of the stream."""
        return self._stream.state()
