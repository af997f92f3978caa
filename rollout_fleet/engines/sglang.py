"""The SGLang engine: a separate server, called over HTTP on the loopback interface.

A weight update has four steps: pause generation, load, verify, continue. If a step fails, the engine has failed,
and the server stays paused until it is stopped.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import asdict, replace
from http import HTTPStatus
from typing import Any

import aiohttp
import numpy as np
import orjson

from asyncrl.core import record
from asyncrl.core.errors import EngineError, RequestRefused
from asyncrl.core.record import SpanKind
from asyncrl.core.types import FinishReason, WeightOffer
from rollout_fleet.config import EngineDevice, OnUpdate, RolloutFleetConfig, SamplingConfig

from .engine import (
    TAIL_TOKENS,
    Answers,
    Decode,
    Engine,
    EngineLoad,
    ModelFacts,
    RunningSample,
    SampleOutput,
    SampleRequest,
    check_output,
    load_decoder,
    read_model_facts,
)
from .server_hooks import WEIGHT_LOADER, report_path
from .sglang_server import SERVER_KEEP_ALIVE_S, SGLangServer

logger = logging.getLogger(__name__)

WARM_UP_PROMPTS = (1, 16)  # the warm-up prompts have these lengths, in tokens
WARM_UP_TOKENS = 4
STREAM_INTERVAL = 32  # each streamed chunk after the first has this number of tokens
# `server_hooks.load` may use this fraction of `load_timeout_s`, so that an error is reported before the deadline.
LOADERS_SHARE = 0.9
DEATH_GRACE_S = 2.0
# The client must close idle connections before the server does: a request on a closing connection is lost.
CLIENT_KEEP_ALIVE_S = SERVER_KEEP_ALIVE_S / 4
_EVENT_END = b"\n\n"
_EVENT_START = b"data: "
_LAST_EVENT = b"data: [DONE]"


class StreamedSample(RunningSample):
    """Joins the chunks that the server streams for one sample.

    A chunk holds the tokens since the previous chunk. If the server aborts a sample that waits in the server's queue,
    the final chunk holds all tokens of the sample. Only the final chunk has the version of each token. An earlier chunk
    has only the server's version at that time. After a weight update during the sample, this version is not the version
    of all tokens.
    """

    def __init__(self, request: SampleRequest, version: int = 0) -> None:
        super().__init__(request, version)
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._num_certain = 0
        self._num_cached: int | None = None

    def add(self, chunk: Any) -> SampleOutput | None:
        """Add a chunk. Returns the sample if the chunk is the last one of the sample."""
        meta = chunk["meta_info"]
        triples = meta.get("output_token_logprobs") or []
        num_new = meta["completion_tokens"] - self.num_tokens
        if not 0 <= num_new <= len(triples):
            raise ValueError(f"{num_new} new tokens, but {len(triples)} log-probs")
        new = triples[len(triples) - num_new :]
        new_ids = [triple[1] for triple in new]
        reason = meta["finish_reason"]
        is_aborted = reason is not None and reason["type"] == "abort"
        if not is_aborted and chunk["output_ids"][len(chunk["output_ids"]) - num_new :] != new_ids:
            raise ValueError("output_token_logprobs and output_ids have different tokens")
        self._token_ids += new_ids
        self._logprobs += [triple[0] for triple in new]
        self.num_tokens += num_new
        if reason is not None:
            self._num_cached = meta.get("cached_tokens") if self.num_tokens else None
            versions = np.full(self.num_tokens, -1, dtype=np.int32)
            for span in meta.get("weight_versions") or []:
                versions[span["start"] : span["end"]] = int(span["version"])
            return self._output(versions, None if is_aborted else FinishReason(reason["type"]))
        if self._num_certain + num_new == self.num_tokens and meta.get("weight_version") == str(self.version):
            self._num_certain = self.num_tokens
        return None

    def so_far(self) -> SampleOutput:
        """Return the tokens whose version is certain (`RunningSample.so_far`)."""
        return self._output(np.full(self._num_certain, self.version, dtype=np.int32), None)

    def _output(self, versions: np.ndarray, finish_reason: FinishReason | None) -> SampleOutput:
        return SampleOutput(
            token_ids=np.asarray(self._token_ids[: len(versions)], dtype=np.int32),
            logprobs=np.asarray(self._logprobs[: len(versions)], dtype=np.float32),
            versions=versions,
            finish_reason=finish_reason,
            num_cached=self._num_cached,
        )


class SGLangEngine(Engine):
    """An engine with an SGLang server. If ``server`` is None, the engine makes a new server.

    Attributes:
        server: The server, with its process and its address.
    """

    sample_type = StreamedSample

    def __init__(
        self,
        config: RolloutFleetConfig,
        *,
        model_path: str,
        device: EngineDevice,
        rank: int,
        log_dir: str,
        seed: int,
        server: SGLangServer | None = None,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._decode: Decode | None = None
        self.facts: ModelFacts = read_model_facts(model_path)
        self.server = server or SGLangServer(
            config,
            model_path=model_path,
            device=device,
            rank=rank,
            log_dir=log_dir,
            seed=seed,
            head_dim=self.facts.head_dim,
        )
        super().__init__(
            self.server.name,
            vocab_size=self.facts.vocab_size,
            silence_timeout_s=config.silence_timeout_s,
            log_tail=self.server.log_tail,
            image_token_id=self.facts.image_token_id,
        )
        self.client = SGLangClient(self.server)
        self._loading_turn = asyncio.Lock()
        self._is_released = False
        self._has_said_it_keeps = False

    async def start(self) -> None:
        """Start the server and generate warm-up tokens (`Engine.start`)."""
        began_s = time.monotonic()
        await self.server.start()
        await self.client.open()
        spent_s, timeout_s = time.monotonic() - began_s, self._config.start_timeout_s
        async with self._deadline("generate", timeout_s, "start_timeout_s", spent_s=spent_s):
            await self.client.call("GET", "/model_info")
            await self._warm_up()
        self._come_up(self.server.wait_exit, self.silence.wait)
        logger.info("%s: up", self._name)

    async def release_memory(self) -> None:
        """Pause the server and free its weights and KV cache on the device (`Engine.release_memory`).

        A server without SGLang's memory saver only pauses, and keeps its memory.
        """
        self._check_up()
        if self._running:
            raise EngineError(f"{self._name} cannot release its memory while it generates {sorted(self._running)}")
        async with (
            self._loading_turn,
            self._deadline("release its memory", self._config.load_timeout_s, "load_timeout_s"),
        ):
            await self._order("/pause_generation", {"mode": "retract"}, status="ok")
            if self.server.saves_memory:
                await self.client.call("POST", "/release_memory_occupation", {})
            elif not self._has_said_it_keeps:
                logger.warning("%s: only pauses; it has no memory saver and keeps its memory", self._name)
                self._has_said_it_keeps = True
            self._is_released = True

    async def load_weights(self, offer: WeightOffer) -> float:
        """Pause the server, load and verify weights, and continue (`Engine.load_weights`)."""
        async with self._loading_turn:
            self._check_up()
            recomputes = self._config.sglang.on_update is OnUpdate.recompute
            with self.silence.paused(recomputes=recomputes) as stands_still:
                async with self._loading(offer, self._config.load_timeout_s):
                    return await self._transact(offer, stands_still)

    async def abort(self, request_ids: Collection[str]) -> None:
        """Ask the server to abort running requests (`Engine.abort`).

        This call has no deadline. If the server does not answer, the engine fails after `silence_timeout_s`.
        """
        ids = self._running.keys() & request_ids
        bodies: list[dict[str, Any]] = [{"rid": _server_id(request_id)} for request_id in ids]
        if ids and ids == self._running.keys():
            bodies = [{"abort_all": True}]

        async def send() -> None:
            await asyncio.gather(*(self.client.call("POST", "/abort_request", body) for body in bodies))

        await self.unless_failed(send())

    async def read_load(self) -> EngineLoad:
        """Ask the server how many samples run and wait, and how full its KV cache is (`Engine.read_load`).

        The numbers are up to 15 model steps old.
        """
        answer = await self.unless_failed(self.client.call("GET", "/v1/loads?include=core"))
        try:
            ranks = answer["loads"]
            return EngineLoad(
                num_running=sum(int(rank["num_running_reqs"]) for rank in ranks),
                num_waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
                cache_use=max(float(rank["token_usage"]) for rank in ranks),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self._name} answered GET /v1/loads with {str(answer)[:500]}: {error!r}") from error

    async def stop(self) -> None:
        """Close the connections to the server and stop the server (`Engine.stop`)."""
        self._go_down()
        await self.client.close()
        await self.server.stop()

    async def _probe(self) -> None:
        await self.client.call("GET", "/server_info")

    # Generation

    async def _warm_up(self) -> None:
        """Generate a few tokens with the run's sampling options. On CUDA, the first requests compile kernels."""
        for length in WARM_UP_PROMPTS:
            prompt = np.arange(length, dtype=np.int32) % self._vocab_size
            sampling = replace(self._config.sampling, max_new_tokens=WARM_UP_TOKENS)
            requests = [
                SampleRequest(id=f"warm-up-{length}-{i}", prompt_ids=prompt, sampling=sampling) for i in range(2)
            ]
            async for events in self.client.stream("/generate", self.request_body(requests)):
                for event in events:
                    if "error" in event:
                        raise EngineError(f"{self._name} cannot generate: {str(event['error'])[:500]}")

    def _begin(self, samples: Sequence[StreamedSample], answers: Answers) -> list[asyncio.Task[None]]:
        size = self._config.sglang.samples_per_request
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        return [asyncio.create_task(self._generate_batch(batch, answers)) for batch in batches]

    async def _generate_batch(self, samples: Sequence[StreamedSample], answers: Answers) -> None:
        try:
            num_unanswered = len(samples)
            body = self.request_body([sample.request for sample in samples])
            async for events in self.client.stream("/generate", body):
                self.silence.token()
                if self.has_failed:
                    return
                finished: list[tuple[SampleRequest, SampleOutput]] = []
                try:
                    for event in events:
                        finished += self._take(event, samples)
                finally:
                    num_unanswered -= len(finished)
                    answers.put_nowait(finished)
            if num_unanswered:
                raise EngineError(f"{self._name} gave no answer to {num_unanswered} of {len(samples)} samples")
        except RequestRefused as error:
            answers.put_nowait(error)
        except Exception as error:  # noqa: BLE001 - the engine has failed
            answers.put_nowait(self.fail(error))

    def _take(self, event: Any, samples: Sequence[StreamedSample]) -> list[tuple[SampleRequest, SampleOutput]]:
        """Add a streamed event to its sample. If the sample is complete, returns a list with (request, sample)."""
        if "error" in event:
            raise RequestRefused(f"{self._name} answered POST /generate with {str(event['error'])[:500]}")
        try:
            if (reason := event["meta_info"]["finish_reason"] or {}).get("status_code") == HTTPStatus.BAD_REQUEST:
                raise RequestRefused(f"{self._name} refuses a request: {reason.get('message', reason)}")
            sample = samples[event.get("index", 0)]
            had_begun = sample.num_tokens > 0
            output = sample.add(event)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"{self._name} sent an unexpected event: {error!r} in {str(event)[:500]}") from error
        request = sample.request
        if request.on_first_token is not None and sample.num_tokens and not had_begun:
            request.on_first_token()
        if output is None:
            return []
        if output.finish_reason is None and self._is_at_stop(request.sampling, output.token_ids.tolist()):
            output = replace(output, finish_reason=FinishReason.stop)
        check_output(output, request, vocab_size=self._vocab_size, loaded_versions=self._verified)
        return [(request, output)]

    def _is_at_stop(self, sampling: SamplingConfig, token_ids: Sequence[int]) -> bool:
        """Return whether an aborted sample ends with a stop token or a stop text.

        If a sample ends in the model step in which the server aborts the sample, the server reports only the abort.
        """
        if {*token_ids[-1:]} & self._stop_ids(sampling):
            return True
        num_tail = max(map(len, sampling.stop), default=0) + TAIL_TOKENS
        text = self.decoder()(token_ids[-num_tail:]) if sampling.stop else ""
        return any(stop in text for stop in sampling.stop)

    def _stop_ids(self, sampling: SamplingConfig) -> set[int]:
        return {*self.facts.eos_ids, *sampling.stop_token_ids}

    def request_body(self, requests: Sequence[SampleRequest]) -> dict[str, Any]:
        """Return the body of ``POST /generate`` for requests of one batch."""
        options = {sampling: self._sampling_parameters(sampling) for sampling in {r.sampling for r in requests}}
        columns: dict[str, list[Any]] = {
            "rid": [_server_id(request.id) for request in requests],
            "input_ids": [np.ascontiguousarray(request.prompt_ids) for request in requests],
            "sampling_params": [options[request.sampling] for request in requests],
            **self._image_data(requests),
        }
        is_single = len(requests) == 1  # do not send one request as a list, because SGLang answers more slowly then
        values = {name: column[0] for name, column in columns.items()} if is_single else columns
        return {**values, "return_logprob": True, "stream": True}

    def _image_data(self, requests: Sequence[SampleRequest]) -> dict[str, Any]:
        if not any(request.images for request in requests):
            return {}
        known: dict[bytes, dict[str, Any]] = {}
        for request in requests:
            if request.images and request.prompt_key not in known:
                pixels = np.concatenate([placed.image.pixels for placed in request.images])
                known[request.prompt_key] = {
                    "format": "processor_output",
                    "pixels": base64.b64encode(pixels.data).decode(),
                    "grids": [placed.image.grid for placed in request.images],
                    "offsets": [(placed.offset, placed.end - 1) for placed in request.images],
                }
        return {"image_data": [[known[r.prompt_key]] if r.images else None for r in requests]}

    def _check_sampling(self, sampling: SamplingConfig) -> None:
        asked = [name for name in ("stop", "json_schema") if getattr(sampling, name)]
        if asked and not self._config.needs_server_tokenizer:
            raise RequestRefused(
                f"{self._name} has no tokenizer, but a request has the options {asked}; set "
                "rollout_fleet.sglang.tokenizer=true (rollout_fleet.environment.name also loads the tokenizer)"
            )

    def decoder(self) -> Decode:
        """Return a function that decodes token ids to text with special tokens (`Engine.decoder`)."""
        if self._decode is None:
            self._decode = load_decoder(self._model_path, special_tokens=True)
        return self._decode

    def _sampling_parameters(self, sampling: SamplingConfig) -> dict[str, Any]:
        optional = {
            "stop": list(sampling.stop),
            "json_schema": sampling.json_schema,
            "sampling_seed": sampling.seed,
        }
        return {
            **{name: value for name, value in optional.items() if value not in ([], "", None)},
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": sorted(self._stop_ids(sampling)),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "stream_interval": STREAM_INTERVAL,
        }

    # Weights

    async def _order(self, path: str, body: Any, **confirmed: Any) -> None:
        answer = await self.client.call("POST", path, body)
        if not isinstance(answer, dict) or any(answer.get(key) != value for key, value in confirmed.items()):
            raise EngineError(f"{self._name} answered POST {path} with {str(answer)[:500]}, expected {confirmed}")

    async def _transact(self, offer: WeightOffer, stands_still: Callable[[], None]) -> float:
        """Pause the server, load and verify the weights, set their version, and continue.

        After an error the server stays paused. This method calls the function ``stands_still`` when the running model
        step is done. Returns the seconds from that call until the server continues.
        """
        order, number = self.server.weight_order, secrets.token_hex(8)
        timeout_s = self._config.load_timeout_s * LOADERS_SHARE
        order.write_text(json.dumps({"order": number, "offer": asdict(offer), "timeout_s": timeout_s}))
        keeps = self._config.sglang.on_update is OnUpdate.keep
        with _stage("pause", offer):
            await self._order("/pause_generation", {"mode": "in_place" if keeps else "retract"}, status="ok")
        takes_memory_back = self._is_released and self.server.saves_memory
        with _stage("running step", offer):
            if takes_memory_back:
                await self.client.call("POST", "/resume_memory_occupation", {"tags": ["weights"]})
            await self._order("/begin_weight_update", {}, success=True)
        stands_still()
        paused_s = time.perf_counter()
        no_tensors = base64.b64encode(pickle.dumps([])).decode()
        body = {
            "serialized_named_tensors": [no_tensors] * self.server.tp_size,
            "load_format": WEIGHT_LOADER,
            "flush_cache": not keeps,
        }
        with _stage("load and verify", offer):
            await self._order("/update_weights_from_tensor", body, success=True)
            num_values = self._verified_values(offer, number)
        # The weights are verified, so answers may now have the new version.
        # The order of the next two calls does not matter, because the server stays paused until both have ended.
        version = str(offer.version)
        named = {"new_version": version, "abort_all_requests": False}
        with _stage("end", offer):
            await asyncio.gather(
                self._order("/end_weight_update", {}, success=True),
                self._order("/update_weight_version", named, new_version=version),
            )
            if takes_memory_back:  # allocate the KV cache after the load, because the load may need this memory
                await self.client.call("POST", "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        self._is_released = False
        self._version = offer.version
        self._verified.add(offer.version)
        with _stage("continue", offer):
            await self._order("/continue_generation", {}, status="ok")
        logger.debug("%s: version %d, %d values verified", self._name, offer.version, num_values)
        return time.perf_counter() - paused_s

    def _verified_values(self, offer: WeightOffer, number: str) -> int:
        num_values = 0
        for rank in range(self.server.tp_size):
            try:
                report = json.loads(report_path(self.server.weight_order, rank).read_text())
            except (FileNotFoundError, ValueError) as error:
                raise EngineError(f"{self._name}: rank {rank} did not report on {offer.manifest}: {error!r}") from error
            if "error" in report:
                raise EngineError(f"{self._name}: rank {rank} did not load {offer.manifest}. {report['error']}")
            if report["order"] != number:
                raise EngineError(
                    f"{self._name}: rank {rank} did not load {offer.manifest}; the report is from an earlier load"
                )
            num_values += report["num_values"]
        return num_values


def _stage(name: str, offer: WeightOffer) -> record.OpenSpan:
    return record.span(SpanKind.load_stage, lane="/load", version=offer.version, cause=name)


def _server_id(request_id: str) -> str:
    """Return the id of a request on the server. It ends with a slash, because an abort matches ids by their prefix."""
    return f"{request_id}/"


class SGLangClient:
    """A pool of HTTP connections to one running server. Call `open` when the server is up.

    Every call raises `RequestRefused` for an HTTP status 4xx, and `WorkerDiedError` if the server died. It raises
    `EngineError` for other failures, or if the server cannot be reached.

    Attributes:
        server: The server at the other end of the connections.
    """

    def __init__(self, server: SGLangServer) -> None:
        self.server = server
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make an empty pool of connections. The first `call` or `stream` connects to the server."""
        self._session = aiohttp.ClientSession(
            self.server.url,
            headers={**self.server.headers, "Content-Type": "application/json"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def close(self) -> None:
        """Close all connections. May be called more than once."""
        if self._session is not None:
            await self._session.close()

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send ``body`` as JSON to the server, and return the parsed JSON answer, or None if the answer is empty.

        If the connection breaks, the request is sent once more. A repeated request must therefore be harmless.
        """
        session = self._opened(method, path)
        try:
            try:
                status, content = await _exchange(session, method, path, body)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                await self._raise_if_dead()
                logger.warning("%s: %s %s is sent again after %r", self.server.name, method, path, error)
                status, content = await _exchange(session, method, path, body)
        except aiohttp.ClientError as error:
            raise await self._unreachable(method, path, error) from error
        self._check_status(status, method, path, content)
        return self._decoded(content, method, path) if content else None

    async def stream(self, path: str, body: Any) -> AsyncIterator[list[Any]]:
        """Post ``body`` as JSON, and yield the server-sent events of the answer, parsed from JSON.

        Each yielded list has the events that arrived together. The request is sent only once, and has no deadline.
        """
        session = self._opened("POST", path)
        try:
            async with session.post(path, data=_encoded(body)) as response:
                if response.status != 200:
                    self._check_status(response.status, "POST", path, await response.read())
                unread = b""
                async for data in response.content.iter_any():
                    *events, unread = (unread + data).split(_EVENT_END)
                    if found := [event.removeprefix(_EVENT_START) for event in events if event != _LAST_EVENT]:
                        yield self._decoded(b"[" + b",".join(found) + b"]", "POST", path)
        except aiohttp.ClientError as error:
            raise await self._unreachable("POST", path, error) from error

    def _opened(self, method: str, path: str) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            raise EngineError(f"{self.server.name} is not running; {method} {path} cannot be sent")
        return self._session

    def _check_status(self, status: int, method: str, path: str, content: bytes) -> None:
        if status != 200:
            kind = RequestRefused if 400 <= status < 500 else EngineError
            raise kind(f"{self.server.name} answered {method} {path} with {status}: {content[:500]!r}")

    def _decoded(self, content: bytes, method: str, path: str) -> Any:
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise EngineError(
                f"{self.server.name} answered {method} {path} with a body that is not JSON ({error}): {content[:500]!r}"
            ) from error

    async def _unreachable(self, method: str, path: str, error: Exception) -> EngineError:
        await self._raise_if_dead()
        return EngineError(f"{self.server.name} could not be reached for {method} {path}: {error!r}")

    async def _raise_if_dead(self) -> None:
        """Wait up to `DEATH_GRACE_S` seconds for the server's exit. If the server exits, raise `WorkerDiedError`.

        Connections of a dying server break before the server exits, so the server may be dying if a request fails.
        """
        try:
            async with asyncio.timeout(DEATH_GRACE_S):
                await self.server.wait_exit()
        except TimeoutError:
            return


async def _exchange(session: aiohttp.ClientSession, method: str, path: str, body: Any) -> tuple[int, bytes]:
    async with session.request(method, path, data=None if body is None else _encoded(body)) as response:
        return response.status, await response.read()


def _encoded(body: Any) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
