"""The state of a run at a checkpoint, and how a run continues from it.

A checkpoint of policy version v is the state of the run after v learner steps. It has two parts. The ranks write one
part: the weights and the `RunState`. The buffer writes the other part: the ledger (its record of all groups), the
stored groups, the prompts, and the saved first tokens of unfinished groups. So a run that continues from the checkpoint
keeps the token counts, and knows the finished prompts and the policy version of each token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.core.errors import CheckpointError, ReplayBufferError
from asyncrl.core.ports import ControlBuffer, FleetPort, LearnerPort, PromptSource
from asyncrl.core.types import BufferStats
from asyncrl.run.run_folder import is_in_use, shared_folder
from buffer.checkpoint_parts import LEDGER_PART, MARKS
from buffer.checkpoints import MAX_WRITING
from buffer.config import BufferConfig, Durability
from buffer.journal import lock_journal, read_values
from buffer.keys import BufferRole, client_keys, server_keys
from learner.checkpoint_folder import (
    checkpoint_path,
    missing_parts,
    newest_checkpoint,
    part_of,
    read_progress,
    saved_checkpoints,
    whole_checkpoints,
)

logger = logging.getLogger(__name__)

BUFFER = "buffer"
"""Name of the folder with the buffer's parts of the checkpoints. The folder is next to the ranks' checkpoints."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run that the ranks save in their part of a checkpoint.

    Attributes:
        version: Learner version: the number of committed learner steps.
        key: Random name of the checkpoint. The ranks' part and the buffer's part have the same key.
        lineage: Random name of the run. If the run is continued, the name stays the same.
        prompts: State of the prompt stream. Its ``position`` is the number of prompts that the stream has handed out.
        tokens_generated: Number of tokens that all engines have generated since the run first began.
        options: The result of `learning_options` at the time of the save: the options that influence learning.
    """

    version: int = 0
    key: str = ""
    lineage: str = ""
    prompts: Mapping[str, Any] = field(default_factory=dict)
    tokens_generated: int = 0
    options: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunState:
        """Make the state from ``values``, a result of `to_dict`. Raises `ValueError` if a key is missing or unknown."""
        names = sorted(cls.__dataclass_fields__)
        if sorted(values) != names:
            raise ValueError(
                f"a checkpoint to resume must hold {names} of its run, got {sorted(values)}; another version of "
                "asyncrl saved this checkpoint, or it is not the checkpoint of a run"
            )
        return cls(**values)

    def changed_options(self, config: RunConfig) -> list[str]:
        """Return one text for each option of ``config`` whose value differs from the checkpoint's value.

        Example: ``learner.optimizer.lr was 0.001, is 0.0001``.
        """
        now = learning_options(config)
        return [f"{name} was {was}, is {now[name]}" for name, was in self.options.items() if now.get(name, was) != was]


def learning_options(config: RunConfig) -> dict[str, str]:
    """Return the options that influence learning, as a dict from dotted name to value as text."""
    critic = config.learner.critic
    sections = {
        "model": config.model,
        "algorithm": config.algorithm,
        "learner.optimizer": config.learner.optimizer,
        "learner.critic": replace(critic, **dict.fromkeys(critic.own)),  # leave out options such as sp_size
        "learner.lora": config.learner.lora,
        "rollout_fleet.sampling": config.rollout_fleet.sampling,
    }
    found = {f"{name}.{key}": str(value) for name, part in sections.items() for key, value in asdict(part).items()}
    buffer = {
        f"buffer.{key}": str(getattr(config.buffer, key))
        for key in ("max_lag", "max_uses", "on_stale", "order", "filters")
    }
    fleet = config.rollout_fleet
    by_source = (fleet.rewards_by_source, fleet.sampling_by_source, fleet.reward_options)
    more = [part for part in by_source if part]
    return found | buffer | {"rollout_fleet.reward": " ".join(map(str, [fleet.reward_weights, *more]))}


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A checkpoint from which a run continues.

    Attributes:
        checkpoint: Folder of the checkpoint.
        state: The run's state in the checkpoint.
        earlier: The buffer's counts at the checkpoint; None before `take_up` returns them.
    """

    checkpoint: Path
    state: RunState
    earlier: BufferStats | None = None

    @property
    def buffer_part(self) -> Path:
        """The folder with the part of the checkpoint that the buffer wrote."""
        return part_of(self.checkpoint, BUFFER)


class Checkpointer:
    """Saves the checkpoints of a run when they are due.

    The buffer writes its parts of the checkpoints in the background. While the buffer still writes its parts of
    `MAX_WRITING` checkpoints, the next checkpoint is postponed to a later step.
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
        self._queued: dict[int, RunState] = {}
        self._writes: set[asyncio.Future[Any]] = set()
        self._is_due = False
        self._requests: list[asyncio.Future[Path]] = []
        self._copied: list[tuple[Path, list[asyncio.Future[Path]]]] = []

    def committed(self) -> None:
        """Answer each request (`requested`) whose checkpoint is complete. Call this after the buffer commits a step.

        Raises `ReplayBufferError` if the buffer could not write its part of a checkpoint.
        """
        for write in [write for write in self._writes if write.done()]:
            self._writes.discard(write)
            write.result()
        self._answer_requests()

    async def requested(self) -> Path:
        """Save a checkpoint with the next learner step. Wait until the save is complete, and return the folder.

        After the save is complete, the call may still wait until the next step is committed. Raises `CheckpointError`
        if the run is on several nodes and the options do not say that all nodes share the folder of checkpoints.
        """
        if not self._config.shares_checkpoints:
            raise CheckpointError(
                "a run on several nodes saves checkpoints in a folder that all nodes share; start the run with "
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
                    if not request.done():  # if the client has disconnected, the request is already cancelled
                        request.set_result(folder)

    async def save_if_due(self, version: int) -> Awaitable[str] | None:
        """If a checkpoint is due, queue a checkpoint of ``version`` on the ranks. Otherwise return None.

        Await the result to get the checkpoint's folder.
        """
        is_last, every = version == self._config.total_steps, self._config.checkpoint.every_steps
        is_new = every > 0 and (version % every == 0 or is_last)
        if not (is_new or self._is_due or self._requests):
            return None
        if not is_last and sum(not write.done() for write in self._writes) >= MAX_WRITING:
            if not self._is_due:
                logger.warning(
                    "the checkpoint of step %d waits: the buffer still writes its parts of two earlier checkpoints; if "
                    "this happens often, raise checkpoint.every_steps, or look for a store server that is slow",
                    version,
                )
            self._is_due = True
            return None
        self._is_due = False
        return await self.save(version, wait=is_last)

    async def save(self, version: int, *, wait: bool) -> Awaitable[str]:
        """Queue a checkpoint of ``version``. Call this directly after you have queued the update for this version.

        Await the result to get the checkpoint's folder. If ``wait`` is true, the await ends only after the buffer has
        written its part.
        """
        key = uuid.uuid4().hex
        part = part_of(checkpoint_path(self._learner.checkpoints, version), BUFFER)
        write = asyncio.ensure_future(self._buffer.checkpoint(part.absolute(), version, key=key))
        # `committed` raises the error of the task `write`. Read the error here too, because asyncio logs unread errors.
        write.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._writes.add(write)
        await asyncio.sleep(0)  # let the task `write` send its request before `stats` sends the next request
        await self._buffer.stats()  # the buffer answers after it has counted the tokens of its part of the checkpoint
        # Give the prompt sampler all groups that are finished in the buffer's part. Then save the sampler's state.
        if self._prompts.wants_outcomes:
            self._prompts.note(await self._buffer.enqueue((), wants_outcomes=True))
        state = self._queued[version] = RunState(
            version=version,
            key=key,
            lineage=self._resumed.lineage,
            prompts=self._prompts.state(),
            tokens_generated=self._resumed.tokens_generated + (await self._fleet.counters()).tokens_generated,
            options=learning_options(self._config),
        )
        requests, self._requests = self._requests, []
        saving = self._learner.save(version, state.to_dict(), wait=wait, parts=[BUFFER])
        copied = asyncio.ensure_future(self._copied_by(saving, requests, [write] if wait else []))
        # Read the error of the task `copied` here, because asyncio logs unread errors. The caller gets the error too.
        copied.add_done_callback(lambda done: done.cancelled() or done.exception())
        return copied

    async def _copied_by(
        self, saving: Awaitable[str], requests: list[asyncio.Future[Path]], writes: Sequence[Awaitable[Any]]
    ) -> str:
        folder = await saving
        for write in writes:
            await write
        if requests:
            self._copied.append((Path(folder), requests))
        self._answer_requests()
        return folder

    def newest(self, folder: Path) -> Resumed | None:
        """Return the newest complete checkpoint in ``folder`` that this process has saved, or None.

        The method leaves out checkpoints of other runs, which may save into the same folder.
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
        """Forget the checkpoints of versions after ``version``, because the learner goes back to ``version``."""
        self._queued = {saved: state for saved, state in self._queued.items() if saved <= version}


def find_checkpoint(config: RunConfig) -> Resumed | None:
    """Return the checkpoint that the option ``checkpoint.resume`` names.

    Returns None if the option is ``never``, or if it is ``auto`` and there is no checkpoint. Raises `ValueError` if the
    option is a path without a checkpoint, or if the checkpoint already has ``total_steps`` steps.
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
            f"{config.total_steps}; raise total_steps, or set checkpoint.resume=never"
        )
    return Resumed(checkpoint=path, state=RunState.from_dict(progress.run))


def check_beginning(config: RunConfig) -> None:
    """Check a run's checkpoint, keys and buffer folder before anything starts.

    Raises `ValueError` if ``buffer.directory`` or ``checkpoint.directory`` has files of another run, or if a run on
    this host still uses ``checkpoint.directory``. Also raises the errors of `find_checkpoint` and `check_keys`.
    """
    if config.buffer.keys:
        check_keys(Path(config.buffer.keys))
    found = find_checkpoint(config)
    own = config.checkpoint.directory
    for checkpoint, progress in saved_checkpoints(Path(own)).items() if own else ():
        if is_in_use(shared_folder(Path(progress.life))):
            raise ValueError(
                f"checkpoint.directory={own} must not be in use, but the run in {progress.life} still saves its "
                "checkpoints in this directory; stop that run, or name another directory"
            )
        if found is None or progress.run.get("lineage", "") != found.state.lineage:
            raise ValueError(
                f"checkpoint.directory={own} must hold only checkpoints of this run, got {checkpoint.name} of another "
                "run; name an empty directory, or continue that run with checkpoint.resume=auto"
            )
    if found is not None or config.buffer.durability is not Durability.disk:
        return
    folder = Path(config.buffer.directory)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"buffer.directory={folder} must be empty for a run that does not resume, got files of another run; name "
            "an empty directory, remove the old one, or continue from a checkpoint with checkpoint.resume=auto"
        )


def check_keys(folder: Path) -> None:
    """Check that all access keys in ``folder`` belong to one run. If there is no ``server.json``, check nothing.

    With keys of different runs, the buffer server would not answer its clients. In this case, raises `ValueError`.
    """
    if not (folder / "server.json").is_file():
        return
    server = server_keys(folder)
    for role, public in server.role_publics.items():
        keys = client_keys(folder, BufferRole(role))
        if (server.public, public) != (keys.server_public, keys.public):
            raise ValueError(
                f"buffer.keys={folder} must hold the keys of one run, got a server.json and a {role}.json of different "
                "runs; remove the folder, so that new keys are made, or name another folder"
            )


def begin_buffer_at(options: BufferConfig, resumed: Resumed) -> BufferConfig:
    """Return options with which the buffer of a resumed run loads its earlier state.

    The buffer loads its part of the checkpoint. If the earlier process left a journal (the buffer's log on disk) that
    includes the checkpoint, the buffer loads the journal instead. A run with a prompt sampler does not use the journal,
    because the sampler may choose other prompts after the checkpoint than before. If the journal is not used, the
    function renames its folder. Raises `ValueError` if the checkpoint lacks the buffer's part.
    """
    state, part = resumed.state, resumed.buffer_part
    if not part.is_dir():
        raise ValueError(
            f"{resumed.checkpoint} needs the buffer's part in {part}, got none; name another checkpoint, or copy "
            "checkpoints with all their parts"
        )
    options = replace(options, lineage=state.lineage, checkpoint=str(part.absolute()))
    kept = Path(options.directory)
    if options.durability is not Durability.disk or not kept.is_dir():
        return options
    with suppress(ReplayBufferError, ValueError):  # there is no journal, or another release of asyncrl wrote it
        values = read_values(kept / LEDGER_PART)
        if state.key in (values.get(MARKS) or ()) and "sampler" not in state.prompts:
            return replace(options, checkpoint="", earlier_epoch=values["epoch"])
    os.close(lock_journal(kept / LEDGER_PART))
    kept.rename(kept.with_name(f"{kept.name}.before-resume-{time.strftime('%Y%m%d-%H%M%S')}"))
    return options


async def take_up(buffer: ControlBuffer, resumed: Resumed) -> Resumed:
    """Make the buffer of a resumed run go back to the run's checkpoint. Call this before learner and engines run.

    The buffer drops the groups and the saved prefixes (first tokens of unfinished groups) that have a token of a later
    version than the checkpoint's. Returns a copy of ``resumed`` with the buffer's counts in ``earlier``. In this copy,
    ``state.tokens_generated`` is the buffer's count of tokens.
    """
    state = resumed.state
    for version in range((await buffer.stats()).learner_version, state.version):
        await buffer.commit(version)
    await buffer.resume(state.version, key=state.key, tokens_generated=state.tokens_generated)
    earlier = await buffer.stats()
    return replace(resumed, state=replace(state, tokens_generated=earlier.num_tokens), earlier=earlier)
