"""The SGLang engine: one server of its own, spoken to over HTTP on the loopback interface.

A sample is one SGLang request; several prompt groups travel in one HTTP request, which reaches the scheduler as one
batch. Weights come by a shared file in one transaction: pause, update, verify, continue.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from asyncrl.protocol.errors import DeadlineError, EngineError, WorkerDiedError
from asyncrl.protocol.types import FinishReason, WeightSnapshot
from rollout_fleet.config import Device, RolloutFleetConfig, SamplingConfig
from rollout_fleet.types import GenerationRequest, GroupOutput, SampleOutput

from .base import check_output, check_prompt
from .model_files import ModelFacts, read_model_facts
from .sglang_server import SERVER_KEEP_ALIVE_S, SGLangServer

logger = logging.getLogger(__name__)

DEATH_GRACE_S = 2.0
CONTINUE_TIMEOUT_S = 5.0
# The client must drop an idle connection first: a server that closes one while a request is on its way resets it.
CLIENT_KEEP_ALIVE_S = SERVER_KEEP_ALIVE_S / 4


class SGLangEngine:
    """Implements `Engine` on an SGLang server."""

    def __init__(
        self, config: RolloutFleetConfig, *, model_path: str, device: Device, rank: int, log_dir: str, seed: int
    ) -> None:
        """Take the configuration; `start` launches the server."""
        self._config = config
        self._name = f"sglang-{rank}"
        self._facts: ModelFacts = read_model_facts(model_path)
        self._device = device
        self._server = SGLangServer(
            config.sglang,
            model_path=model_path,
            device=device,
            name=self._name,
            log_dir=log_dir,
            seed=seed,
            start_timeout_s=config.start_timeout_s,
            stop_timeout_s=config.stop_timeout_s,
        )
        self._session: aiohttp.ClientSession | None = None
        self._version = 0
        self._published = {0}
        self._loading = asyncio.Lock()
        self._running: dict[str, int] = {}
        self._released = False
        self._has_said_it_keeps = False

    @property
    def version(self) -> int:
        """See `Engine.version`."""
        return self._version

    async def start(self) -> None:
        """See `Engine.start`."""
        await self._server.start()
        self._session = aiohttp.ClientSession(
            self._server.url,
            headers=self._server.headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        await self._call("GET", "/model_info", timeout_s=self._config.start_timeout_s)
        logger.info("%s: up", self._name)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GroupOutput]:
        """See `Engine.generate`."""
        for request in requests:
            check_prompt(request, self._facts.vocab_size)
        size = self._config.groups_per_request
        batches = [requests[start : start + size] for start in range(0, len(requests), size)]
        tasks = [asyncio.create_task(self._generate_batch(batch)) for batch in batches]
        try:
            for finished in asyncio.as_completed(tasks):
                for output in await finished:
                    yield output
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def release_memory(self) -> None:
        """See `Engine.release_memory`. A server without a memory saver keeps its memory and stands still."""
        if self._running:
            raise EngineError(f"{self._name} cannot release its memory while it generates {sorted(self._running)}")
        async with self._loading:
            timeout_s = self._config.load_timeout_s
            await self._call("POST", "/pause_generation", {"mode": "retract"}, timeout_s=timeout_s)
            if self._server.saves_memory:
                await self._call("POST", "/release_memory_occupation", {}, timeout_s=timeout_s)
            elif not self._has_said_it_keeps:
                logger.warning("%s: only stands still; it has no memory saver and keeps its memory", self._name)
                self._has_said_it_keeps = True
            self._released = True

    async def load_weights(self, snapshot: WeightSnapshot) -> float:
        """See `Engine.load_weights`."""
        async with self._loading:
            try:
                async with asyncio.timeout(self._config.load_timeout_s):
                    stood_still_s = await self._transact(snapshot)
            except TimeoutError:
                raise DeadlineError(
                    f"{self._name} did not load policy version {snapshot.version} from {snapshot.path} within "
                    f"rollout_fleet.load_timeout_s = {self._config.load_timeout_s} s"
                ) from None
            self._version = snapshot.version
            return stood_still_s

    async def abort(self, rid: str) -> None:
        """See `Engine.abort`."""
        for index in range(self._running.get(rid, 0)):
            await self._call("POST", "/abort_request", {"rid": _sample_rid(rid, index)}, timeout_s=CONTINUE_TIMEOUT_S)

    async def wait_failed(self) -> None:
        """See `Engine.wait_failed`."""
        await self._server.wait_exit()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if self._session is not None:
            await self._session.close()
        await self._server.stop()

    async def _generate_batch(self, requests: Sequence[GenerationRequest]) -> list[GroupOutput]:
        """Send the groups as one HTTP request and check the answer."""
        self._running.update({request.rid: request.num_samples for request in requests})
        body = self._request_body(requests)
        try:
            answer = await self._call("POST", "/generate", body, timeout_s=self._config.generate_timeout_s)
        finally:
            for request in requests:
                self._running.pop(request.rid, None)
        if not isinstance(answer, list) or len(answer) != len(body["rid"]):
            raise EngineError(f"{self._name} answered {len(body['rid'])} samples with {str(answer)[:200]}")
        samples = iter(answer)
        return [
            self._group_output(request, [next(samples) for _ in range(request.num_samples)]) for request in requests
        ]

    def _request_body(self, requests: Sequence[GenerationRequest]) -> dict[str, Any]:
        rids, prompts, sampling = [], [], []
        for request in requests:
            prompt_ids, parameters = request.prompt_ids.tolist(), self._sampling_parameters(request.sampling)
            for index in range(request.num_samples):
                rids.append(_sample_rid(request.rid, index))
                prompts.append(prompt_ids)
                sampling.append(parameters)
        return {"rid": rids, "input_ids": prompts, "sampling_params": sampling, "return_logprob": True}

    def _sampling_parameters(self, sampling: SamplingConfig) -> dict[str, Any]:
        return {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(self._facts.eos_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }

    def _group_output(self, request: GenerationRequest, answers: Sequence[Any]) -> GroupOutput:
        try:
            output = GroupOutput(rid=request.rid, samples=tuple(_parse_sample(answer) for answer in answers))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"{self._name} answered request {request.rid} against its contract: {error!r}") from error
        check_output(output, request, vocab_size=self._facts.vocab_size, published=self._published)
        return output

    async def _transact(self, snapshot: WeightSnapshot) -> float:
        """Pause, update, verify, continue; continues also when the update failed.

        Returns:
            Seconds from the engine's word that it stands still to its word that it goes on.
        """
        paused_at = time.perf_counter()
        timeout_s = self._config.load_timeout_s
        body = {"model_path": snapshot.path, "weight_version": str(snapshot.version), "flush_cache": True}
        try:
            await self._call("POST", "/pause_generation", {"mode": "retract"}, timeout_s=timeout_s)
            paused_at = time.perf_counter()
            if self._released and self._server.saves_memory:
                await self._call("POST", "/resume_memory_occupation", {}, timeout_s=timeout_s)
            self._released = False
            self._published.add(snapshot.version)
            await self._call("POST", "/update_weights_from_disk", body, timeout_s=timeout_s)
            await self._verify(snapshot)
        finally:
            await asyncio.shield(self._continue_generation())
        return time.perf_counter() - paused_at

    async def _continue_generation(self) -> None:
        try:
            await self._call("POST", "/continue_generation", {}, timeout_s=CONTINUE_TIMEOUT_S)
        except (EngineError, DeadlineError, WorkerDiedError) as error:
            logger.error("%s: generation could not be continued after a weight update: %s", self._name, error)
            raise

    async def _verify(self, snapshot: WeightSnapshot) -> None:
        """Compare the engine's tensors with the published digests, where its layout and dtype make them comparable.

        Exact for an unsharded server on a CPU that serves the dtype the snapshot is stored in. Elsewhere the engine
        hashes otherwise (GPU) or holds other bytes (shards, another dtype), and only its reported version is checked.
        """
        info = await self._call("GET", "/model_info", timeout_s=self._config.load_timeout_s)
        if info.get("weight_version") != str(snapshot.version):
            raise EngineError(
                f"{self._name} reports weight version {info.get('weight_version')!r} after loading {snapshot.version}"
            )
        comparable = self._device is Device.cpu and self._config.sglang.tp_size == 1
        if not (snapshot.checksums and comparable and _stored_dtype(snapshot.path) == self._server.dtype):
            return
        body = {"action": "checksum"}
        answer = await self._call("POST", "/weights_checker", body, timeout_s=self._config.load_timeout_s)
        held = answer["ranks"][0]["checksums"]
        shared = held.keys() & snapshot.checksums.keys()
        wrong = sorted(name for name in shared if held[name] != snapshot.checksums[name])
        if wrong:
            raise EngineError(
                f"{self._name} holds other weights than policy version {snapshot.version} published in "
                f"{snapshot.path}: {len(wrong)} of {len(shared)} tensors differ, first {wrong[0]}"
            )
        logger.debug("%s: version %d, %d of %d tensors verified", self._name, snapshot.version, len(shared), len(held))

    async def _call(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """Call the server; returns its JSON answer, or None when it has none.

        A call whose connection breaks is sent once more on another one. All calls but ``/generate`` may be repeated:
        the second does what the first did, or finds it done.

        Raises:
            EngineError: it refused, or cannot be reached although it lives.
            DeadlineError: no answer within ``timeout_s``.
            WorkerDiedError: it died.
        """
        if self._session is None or self._session.closed:
            raise EngineError(f"{self._name} is not running; {method} {path} cannot be sent")
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    status, content = await self._exchange(method, path, body)
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                    await self._raise_if_dead()
                    if path == "/generate":
                        raise
                    logger.warning("%s: %s %s is sent again after %r", self._name, method, path, error)
                    status, content = await self._exchange(method, path, body)
        except TimeoutError:
            raise DeadlineError(f"{self._name} did not answer {method} {path} within {timeout_s} s") from None
        except aiohttp.ClientError as error:
            await self._raise_if_dead()
            raise EngineError(f"{self._name} could not be reached for {method} {path}: {error!r}") from error
        if status != 200:
            raise EngineError(f"{self._name} answered {method} {path} with {status}: {content[:500]!r}")
        return json.loads(content) if content else None

    async def _exchange(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        """Send one HTTP request; returns the status and the whole body of the answer."""
        assert self._session is not None
        async with self._session.request(method, path, json=body) as response:
            return response.status, await response.read()

    async def _raise_if_dead(self) -> None:
        """Raise the server's death if it died; a connection breaks some time before the process is gone."""
        try:
            async with asyncio.timeout(DEATH_GRACE_S):
                await self._server.wait_exit()
        except TimeoutError:
            return


def _sample_rid(rid: str, index: int) -> str:
    return f"{rid}-{index:03d}"


def _parse_sample(answer: Any) -> SampleOutput:
    meta = answer["meta_info"]
    token_ids = np.asarray(answer["output_ids"], dtype=np.int32)
    reason = meta["finish_reason"]["type"]
    triples = meta.get("output_token_logprobs") or []
    if [triple[1] for triple in triples] != token_ids.tolist():
        raise ValueError("output_token_logprobs name other tokens than output_ids")
    versions = np.full(len(token_ids), -1, dtype=np.int32)
    for span in meta.get("weight_versions") or []:
        versions[span["start"] : span["end"]] = int(span["version"])
    return SampleOutput(
        token_ids=token_ids,
        logprobs=np.asarray([triple[0] for triple in triples], dtype=np.float32),
        versions=versions,
        finish_reason=None if reason == "abort" else FinishReason(reason),
    )


def _stored_dtype(model_path: str) -> str | None:
    """Return the one dtype of a directory's ``model.safetensors``, from its header; None if mixed or sharded."""
    file = Path(model_path) / "model.safetensors"
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    dtypes = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    return {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(dtypes.pop()) if len(dtypes) == 1 else None
