"""Manages the run's folder on other nodes of the cluster: sends models and keys, and collects logs and samples.

The run's folder has the same path on every node. A node that sees the controller's folder, through a shared file
system, needs no copies. On any other node, a Ray actor reads and writes the folder of this node. Each call to an actor
has the deadline ``ray.start_timeout_s``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from itertools import count as count_from
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config import WORKER_ENV, RunConfig
from asyncrl.core.errors import AsyncRLError
from asyncrl.core.host import FOLDER_MODE, NotPrivate, make_private_folder
from asyncrl.core.remote import fetch_async, within
from asyncrl.run.run_folder import RunPaths, join_shared_folder, shared_folder, weight_bytes
from asyncrl.single_controller.resource_pool import node_addresses
from asyncrl.weights.manifest import digest_of
from buffer import BufferRole
from buffer.keys import STORE_KEYS

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20
SAMPLED_BYTES = 1 << 20
CLOSE_S = 5.0
COLLECTED = ("logs", "profile", "receipts", "samples", "tokens", "trajectories")
"""Folders inside the run's folder that are copied from other nodes to the controller's node."""
_KEY_FILES = [STORE_KEYS, *(f"{role}.json" for role in (BufferRole.rollout, BufferRole.learner))]
APPENDED = (".jsonl", ".log", ".msgpack")
"""Suffixes of files that processes append to. All other files are complete as soon as they exist."""


class NodeFiles:
    """A Ray actor that reads and writes the files of its node. All paths are absolute."""

    def sees(self, path: str, content: str) -> bool:
        """Return whether a file exists and has this content."""
        try:
            return Path(path).read_text() == content
        except OSError:
            return False

    def prints(self, folder: str) -> dict[str, str]:
        """Return a fingerprint of each file in a folder, by file name, as `file_prints` computes it."""
        return file_prints(Path(folder))

    def sizes(self, folder: str, parts: Sequence[str]) -> dict[str, int]:
        """Return the number of bytes of each file in the subfolders ``parts``, by path relative to ``folder``.

        Skip files with a leading dot, because they are unfinished.
        """
        found = (path for part in parts for path in Path(folder, part).rglob("*"))
        return {
            str(path.relative_to(folder)): path.stat().st_size
            for path in found
            if path.is_file() and not path.name.startswith(".")
        }

    def make(self, folder: str, mode: int) -> str:
        """Make a folder with the permissions ``mode``. Returns an empty text, or the reason of a failure."""
        try:
            if mode == FOLDER_MODE:
                make_private_folder(Path(folder))
            else:
                Path(folder).mkdir(mode=mode, parents=True, exist_ok=True)
        except (NotPrivate, OSError) as error:
            return f"{error.strerror} ({error.filename})" if isinstance(error, OSError) else str(error)
        return ""

    def hold(self, folder: str) -> str:
        """Lock a folder until this process ends. Returns an empty text, or the reason of a failure."""
        try:
            join_shared_folder(Path(folder))
        except (NotPrivate, OSError) as error:
            return str(error)
        return ""

    def free_bytes(self, folder: str) -> int:
        """Return the number of free bytes on the file system of a folder; 0 if the folder does not exist."""
        return shutil.disk_usage(folder).free if Path(folder).is_dir() else 0

    def write(self, path: str, offset: int, data: bytes, mode: int) -> None:
        """Write ``data`` into a file, from byte ``offset``. Links are not followed. A new file gets ``mode``."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(offset)
            file.write(data)

    def read(self, path: str, offset: int, num_bytes: int) -> bytes:
        """Return up to ``num_bytes`` bytes of a file, from byte ``offset``."""
        with Path(path).open("rb") as file:
            file.seek(offset)
            return file.read(num_bytes)

    def remove(self, folders: Sequence[str]) -> None:
        """Remove folders and their contents."""
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def file_prints(folder: Path) -> dict[str, str]:
    """Return a fingerprint of each file in a folder, by file name.

    A fingerprint has the file's size, and a digest of its first and last bytes.
    """
    prints = {}
    for path in sorted(folder.glob("*")):
        if path.is_file():
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                ends = file.read(SAMPLED_BYTES)
                file.seek(max(0, size - SAMPLED_BYTES))
                ends += file.read(SAMPLED_BYTES)
            prints[path.name] = f"{size}-{digest_of(ends)}"
    return prints


class NodeFolders:
    """The run's folder on all nodes except the controller's node.

    Attributes:
        apart: Addresses of the nodes that do not see the controller's folder, and so have a separate folder.
        keys: Folder with the access keys of the buffer; empty if there are none.
    """

    def __init__(
        self,
        run_dir: Path,
        nodes: Mapping[str, Any],
        *,
        timeout_s: float,
        known: Collection[str] = (),
        make: Callable[[str], tuple[str, Any]] | None = None,
    ) -> None:
        """Store the nodes of the run. Call `open` next.

        ``nodes`` maps the address of each node to the node's `NodeFiles` actor. ``known`` has the ids of these nodes
        and of the controller's node. ``make`` is a function for nodes that join later. It takes the id of a node, and
        returns a pair: the node's address and a new actor on the node.
        """
        self._run_dir = run_dir
        self._nodes = dict(nodes)
        self._known = set(known)
        self._make = make or _node_actor
        self._admissions: dict[str, asyncio.Task[str]] = {}
        self._model = self.keys = self._weights = ""
        self._image_bytes = 0
        self._timeout_s = timeout_s
        self.apart: list[str] = []
        self._collected: dict[tuple[str, str], tuple[Path, int]] = {}
        self._copies: list[Path] = []
        self._collecting = asyncio.Lock()

    async def open(self) -> None:
        """Find out which nodes see the run's folder of the controller.

        Then lock the run's folder in shared memory (`shared_folder`) on each node.
        """
        await self._enter(self._nodes)

    async def supply(self, config: RunConfig, *, keys: str, resumes: bool) -> RunConfig:
        """Send the models and the buffer's keys to every node. Check the folders that all nodes must share.

        Args:
            config: The options of the run.
            keys: Directory of the buffer's keys; empty if there are none.
            resumes: Whether the run resumes from a checkpoint.

        Returns:
            The configuration with model paths that exist on every node.

        Raises:
            ValueError: a node does not see a folder that must be shared, cannot make the run's folder, or has too
                little shared memory.
        """
        self._model, self.keys, self._weights = config.model.path, keys, config.weights.directory
        # Require room in shared memory for two images (copies of the weights) per host.
        # With `Carrier.host_stream`, a host needs two images: one of the loaded version, and one of the next version.
        # With other carriers, each engine needs one image, but this method does not know how many engines a host has.
        self._image_bytes = 2 * weight_bytes(config) if config.weights.keeps_images else 0
        if not self._nodes:
            return config
        if config.checkpoint.every_steps or config.checkpoint.directory or resumes:
            await self.check_shared("checkpoint.directory", RunPaths.checkpoints_of(config, self._run_dir))
        await self._equip(self._nodes)
        learner = config.learner
        paths = {"critic": learner.critic.path, "reward_model": learner.reward_model.path, "model": config.model.path}
        found = {name: str(await self.bring(_absolute(path), name)) if path else "" for name, path in paths.items()}
        learner = replace(
            learner,
            critic=replace(learner.critic, path=found["critic"]),
            reward_model=replace(learner.reward_model, path=found["reward_model"]),
        )
        self._model = found["model"]
        return replace(config, model=replace(config.model, path=self._model), learner=learner)

    async def admit(self, node_id: str) -> str:
        """Send the files of a rollout worker to a node that lacks these files. Returns the model's path on the node.

        Raises:
            ValueError: the node does not see a folder that must be shared, cannot make the run's folder, or has too
                little shared memory.
        """
        if node_id in self._known:
            return self._model
        admission = self._admissions.get(node_id)
        if admission is None or (admission.done() and (admission.cancelled() or admission.exception())):
            admission = self._admissions[node_id] = asyncio.create_task(self._admit(node_id))
        return await asyncio.shield(admission)

    async def _admit(self, node_id: str) -> str:
        address, self._nodes[address] = await asyncio.to_thread(self._make, node_id)
        # Forget which files of this node were already copied, because the node may have left and joined again.
        self._collected = {key: value for key, value in self._collected.items() if key[0] != address}
        await self._enter([address])
        await self._equip([address])
        shares = "copies" if address in self.apart else "shares"
        logger.info("node %s was added; it %s the run's folder", address, shares)
        return str(await self.bring(_absolute(self._model), "model", to=[address]))

    async def _enter(self, addresses: Collection[str]) -> None:
        blind = await self._blind_to(self._run_dir, addresses)
        self.apart = sorted({*self.apart} - {*addresses} | {*blind})
        for address, reason in (await self._ask(addresses, "hold", str(shared_folder(self._run_dir)))).items():
            if reason:
                logger.warning("node %s cannot lock the run's folder in shared memory: %s", address, reason)

    async def _equip(self, addresses: Collection[str]) -> None:
        if self._image_bytes:
            free = await self._ask(addresses, "free_bytes", str(shared_folder(self._run_dir)))
            if small := [f"{node} has {size >> 20}" for node, size in free.items() if size <= self._image_bytes]:
                raise ValueError(
                    "engines keep copies of the weights in their host's shared memory, so each host needs "
                    f"{self._image_bytes >> 20} MiB free, got: {', '.join(small)} MiB; free shared memory on these "
                    "nodes, start their containers with a larger --shm-size, or set weights.transport=file with "
                    "weights.full_every=1 and weights.copy_to_memory=false"
                )
        if self._weights:
            await self.check_shared("weights.directory", _absolute(self._weights), by=addresses)
        await self.send_keys(addresses)

    async def send_keys(self, addresses: Collection[str] | None = None) -> None:
        """Send the buffer's key files to the nodes at ``addresses`` (None: all nodes) that lack one of these files."""
        if not self.keys:
            return
        own = file_prints(Path(self.keys))
        held = await self._ask(self._nodes if addresses is None else addresses, "prints", self.keys)
        lacking = [node for node, prints in held.items() if any(prints.get(name) != own[name] for name in _KEY_FILES)]
        await self._send(Path(self.keys), _KEY_FILES, to=lacking, mode=FOLDER_MODE)  # only the owner may read keys

    async def bring(self, folder: Path, name: str, *, to: Collection[str] | None = None) -> Path:
        """Make a folder of files, such as a model, available on the nodes whose addresses are in ``to`` (None: all).

        Returns ``folder`` if all these nodes already have the same files in ``folder``. Otherwise, the method copies
        the files to these nodes, and returns the path of the copies: ``name`` in the run's folder.
        """
        held = await self._ask(self._nodes if to is None else to, "prints", str(folder))
        if all(prints == file_prints(folder) for prints in held.values()):
            return folder
        target = self._run_dir / name
        if target != folder:
            self._copies.append(target)
            await asyncio.to_thread(_copy_folder, folder, target)  # nodes that share the run's folder read this copy
        apart = [address for address in self.apart if address in held]
        await self._send(target, sorted(file_prints(target)), to=apart, mode=0o755)
        return target

    async def check_shared(self, option: str, folder: Path, *, by: Collection[str] | None = None) -> None:
        """Make ``folder``, and check that the nodes whose addresses are in ``by`` (None: all nodes) see this folder.

        Raises `ValueError` if a node does not see the folder. ``option`` names the option of the folder in the message.
        """
        if blind := await self._blind_to(folder, self._nodes if by is None else by):
            raise ValueError(
                f"{option} must be on a file system that all nodes share, got {folder}, which {', '.join(blind)} "
                "cannot see; name a folder that all nodes mount under the same path"
            )

    async def collect(self) -> None:
        """Copy the folders `COLLECTED` from the other nodes to the controller's node.

        The method copies only files and lines that are new since its previous call. It skips a node that does not
        answer.
        """
        async with self._collecting:
            for address in list(self.apart):
                try:
                    await self._collect_from(address)
                except (AsyncRLError, RayError, OSError) as error:
                    logger.warning("logs and samples of node %s cannot be copied: %s", address, error)

    async def fetch(self, folder: Path) -> None:
        """Copy a folder inside the run's folder from the other nodes to the controller's node."""
        part = str(folder.relative_to(self._run_dir))
        for address in list(self.apart):
            for name, size in (await self._sizes(address, [part])).items():
                await self._read(address, name, 0, size, self._run_dir / name)

    async def close(self) -> None:
        """Copy the new data from the other nodes, as `collect` does. Then remove the run's folders on these nodes.

        The copy and the removal may take at most `CLOSE_S` seconds per node. On every other node, the run's folder in
        shared memory is removed. On the nodes that do not see the controller's folder, the run's folder on disk is
        removed too. The copies of models that `bring` made are also removed.
        """
        for copy in self._copies:
            shutil.rmtree(copy, ignore_errors=True)
        in_memory = str(shared_folder(self._run_dir))
        for address in list(self._nodes):
            folders = [str(self._run_dir), in_memory] if address in self.apart else [in_memory]
            try:
                async with asyncio.timeout(CLOSE_S), self._collecting:
                    if address in self.apart:
                        await self._collect_from(address)
                    await self._ask([address], "remove", folders)
            except (AsyncRLError, RayError, OSError) as error:  # OSError includes TimeoutError
                logger.warning(
                    "node %s still has files of the run, in %s: %s", address, folders, str(error) or "too slow"
                )

    async def _blind_to(self, folder: Path, nodes: Collection[str]) -> list[str]:
        if not nodes:
            return []
        token, content = folder / f".seen-{uuid.uuid4().hex}", uuid.uuid4().hex
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(token.write_text, content)
        try:
            seen = await self._ask(nodes, "sees", str(token), content)
        finally:
            token.unlink()
        return sorted(address for address, sees in seen.items() if not sees)

    async def _collect_from(self, address: str) -> None:
        for name, size in (await self._sizes(address, COLLECTED)).items():
            path, begin = self._collected.get((address, name), (self._run_dir / name, 0))
            # Use a new name if the file exists, because a worker that moved to another node writes the same file names.
            if (address, name) not in self._collected:
                others = (path.with_name(f"{path.stem}-{count}{path.suffix}") for count in count_from(2))
                path = next(free for free in chain([path], others) if not free.exists())
            if size > begin:
                await self._read(address, name, begin, size, path)
                self._collected[address, name] = path, size

    async def _sizes(self, address: str, parts: Sequence[str]) -> dict[str, int]:
        return (await self._ask([address], "sizes", str(self._run_dir), list(parts))).get(address, {})

    async def _read(self, address: str, name: str, begin: int, end: int, path: Path) -> None:
        """Copy a file of a node to ``path`` on this node. If the file is a growing log, append only its new bytes."""
        grows = path.suffix in APPENDED
        target = path if grows else path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab" if grows else "wb") as file:
            for offset in range(begin if grows else 0, end, CHUNK_BYTES):
                size = min(CHUNK_BYTES, end - offset)
                source = str(self._run_dir / name)
                file.write((await self._ask([address], "read", source, offset, size))[address])
        if not grows:
            target.rename(path)

    async def _send(self, folder: Path, names: Sequence[str], *, to: Sequence[str], mode: int) -> None:
        if not to:
            return
        reasons = await self._ask(to, "make", str(folder), mode)
        if failed := [f"{address}: {reason}" for address, reason in reasons.items() if reason]:
            raise ValueError(
                f"every node must have a folder {folder}, shared or separate, but these nodes cannot make it: "
                f"{'; '.join(failed)}; set output_dir to a path that every node can write to"
            )
        for path in (folder / name for name in names):
            size = path.stat().st_size
            for offset in range(0, max(size, 1), CHUNK_BYTES):
                data = ray.put(await asyncio.to_thread(NodeFiles.read, NodeFiles(), str(path), offset, CHUNK_BYTES))
                await self._ask(to, "write", str(path), offset, data, mode & 0o666)

    async def _ask(self, addresses: Iterable[str], method: str, *args: Any) -> dict[str, Any]:
        """Call ``method`` of the nodes' actors. Return a dict of the results by node address, without dead nodes."""
        asked = [address for address in addresses if address in self._nodes]
        calls = [fetch_async([getattr(self._nodes[address], method).remote(*args)]) for address in asked]
        what = f"nodes {', '.join(asked)}, {method} {args[0]}"
        ended = asyncio.gather(*calls, return_exceptions=True)
        answers = dict(zip(asked, await within(ended, self._timeout_s, what, "ray.start_timeout_s"), strict=True))
        for address, answer in answers.items():
            if isinstance(answer, RayActorError):
                logger.warning("node %s is lost, including logs that were not copied from it: %s", address, answer)
                del self._nodes[address]
                self.apart = [other for other in self.apart if other != address]
            elif isinstance(answer, BaseException):
                raise answer
        return {address: answer[0] for address, answer in answers.items() if not isinstance(answer, BaseException)}


@asynccontextmanager
async def node_folders(config: RunConfig, run_dir: Path, say: Callable[[str], None]) -> AsyncIterator[NodeFolders]:
    """Open the run's folder on the other nodes of the cluster. At the end, `NodeFolders.close` removes these folders.

    Raises `DeadlineError` if a node does not answer.
    """
    own = ray.get_runtime_context().get_node_id()
    several = config.placement.num_nodes > 1
    known = [node["NodeID"] for node in ray.nodes() if several and node["Alive"] and node["NodeID"] != own]
    nodes = dict([await asyncio.to_thread(_node_actor, node_id) for node_id in known])
    folders = NodeFolders(run_dir, nodes, timeout_s=config.ray.start_timeout_s, known=[own, *known])
    await folders.open()
    if folders.apart:
        say(f"nodes that do not share {run_dir} get copies, and send logs back: {', '.join(folders.apart)}")
    try:
        yield folders
    finally:
        await folders.close()


def _absolute(path: str) -> Path:
    return Path(path).absolute()


def _node_actor(node_id: str) -> tuple[str, Any]:
    actor = ray.remote(num_cpus=0, runtime_env={"env_vars": WORKER_ENV})(NodeFiles)
    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return node_addresses()[node_id], actor.options(scheduling_strategy=there).remote()


def _copy_folder(source: Path, target: Path) -> None:
    """Replace ``target`` by a copy of the files of ``source``, with hard links where possible."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file():
            try:
                os.link(path, target / path.name)
            except OSError:
                shutil.copy2(path, target / path.name)
