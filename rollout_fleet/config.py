"""Options of the rollout fleet, with their defaults."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from asyncrl.core.errors import check_bounds
from asyncrl.weights.carriers import load_limit_s

from .episodes.config import EnvironmentConfig

CLEANUP_S = 2.0
"""Largest number of seconds to clean up after a killed inference server, or to close its log."""
_BY_SOURCE = frozenset({"max_new_tokens", "stop", "stop_token_ids"})
FLOAT32_NAMES = ("float32", "float")
"""The names that SGLang accepts for the dtype float32."""

SGLANG_RESERVED_POSITIONS = 6
"""Number of token positions at the end of the model's context length that SGLang 0.5.21 leaves empty."""


class EngineKind(StrEnum):
    """Kinds of inference engines: an SGLang server, transformers in the worker's process, or a script for tests."""

    sglang = "sglang"
    transformers = "transformers"
    scripted = "scripted"


class EngineDevice(StrEnum):
    """Device of an inference engine. ``auto`` becomes ``cuda`` if there are enough GPUs, else ``cpu``."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class SaveProgress(StrEnum):
    """When a worker saves the tokens of unfinished prompt groups, so that another worker can continue the groups."""

    never = "never"
    at_stop = "at_stop"
    at_updates = "at_updates"


class OnUpdate(StrEnum):
    """What happens to the KV cache of unfinished samples at a weight update: computed again, or kept unchanged."""

    recompute = "recompute"
    keep = "keep"


class OnRewardFailure(StrEnum):
    """What happens if a reward function fails on one response of a prompt group.

    ``retry_group``: the whole group is generated again. ``drop_trajectory``: only this response is dropped.
    """

    retry_group = "retry_group"
    drop_trajectory = "drop_trajectory"


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling options.

    Behavior log-probs (the log-probs of sampled tokens that training uses) are computed before ``top_p``, ``top_k`` and
    ``min_p`` truncate the distribution. Therefore training refuses these three options.

    Attributes:
        temperature: Softmax temperature of sampling and of behavior log-probs.
        top_p: Nucleus mass; 1.0 keeps all tokens. Evaluation only.
        top_k: Number of most probable tokens to sample from; -1 keeps all tokens. Evaluation only.
        min_p: Smallest probability of a token, as a fraction of the largest probability; 0.0 keeps all tokens.
            Evaluation only.
        max_new_tokens: Longest response, in tokens.
        stop: Texts that end a response. The tokens of the stop text stay in the response.
        stop_token_ids: Token ids that end a response, in addition to the model's end-of-sequence tokens.
        seed: Seed of one response. SGLang ignores it without ``enable_deterministic_inference``. The engine
            ``transformers`` ignores it with ``top_p``, ``top_k`` or ``min_p``.
        json_schema: JSON schema of the response, as text. With a schema, log-probs are computed among the tokens
            that the schema allows.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    json_schema: str = ""

    @property
    def truncations(self) -> list[str]:
        """The options that exclude tokens from sampling, as ``NAME=VALUE``. Example: ``["top_k=20"]``."""
        whole = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
        return [f"{name}={getattr(self, name)}" for name, value in whole.items() if getattr(self, name) != value]

    def greedy(self) -> "SamplingConfig":
        """Return a greedy copy of these options: temperature 0, without ``top_p``, ``top_k`` and ``min_p``."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"rollout_fleet.sampling.temperature must be >= 0, got {self.temperature}; 0 is greedy decoding"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout_fleet.sampling.top_p must be in (0, 1], got {self.top_p}; 1.0 keeps all tokens")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"rollout_fleet.sampling.top_k must be -1 or >= 1, got {self.top_k}; -1 keeps all tokens")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"rollout_fleet.sampling.min_p must be in [0, 1), got {self.min_p}; 0.0 keeps all tokens")
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"rollout_fleet.sampling.stop must hold texts that are not empty, got {list(self.stop)}")
        check_bounds("rollout_fleet.sampling.", self, max_new_tokens=">= 1")


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    """Options of an SGLang server.

    Attributes:
        dtype: Dtype of weights and activations. ``auto`` is bfloat16 on CUDA and float32 on a CPU. float32 on CUDA is
            refused, because SGLang's attention kernels support only 16-bit types.
        tp_size: Tensor-parallel ranks of one server.
        max_total_tokens: KV cache size in tokens. 0: SGLang's choice on a GPU, 32768 on a CPU.
        tokenizer: Load the model's tokenizer in the server, for stop texts and JSON schemas. It is always loaded if
            ``rollout_fleet.environment.name`` or a stop text is set.
        max_running_requests: Largest number of samples that are decoded at the same time.
        samples_per_request: Largest number of samples in one HTTP request. It affects the throughput of a server on a
            CPU.
        memory_saver: Make the server able to free its weights and KV cache. Colocated pools on GPUs need this. A server
            on a CPU only pauses while the learner computes.
        on_update: What happens to the KV cache of unfinished samples at a weight update. ``recompute``: the engine
            computes the cache again, so later tokens depend only on the new weights. ``keep``: the update costs less,
            but later tokens also depend on the old cache. ``keep`` launches the server without prefix cache and without
            overlapped scheduling.
        extra_args: Further ``sglang.launch_server`` arguments, verbatim.
    """

    dtype: str = "auto"
    tp_size: int = 1
    max_total_tokens: int = 0
    tokenizer: bool = False
    max_running_requests: int = 256
    samples_per_request: int = 64
    memory_saver: bool = False
    on_update: OnUpdate = OnUpdate.recompute
    extra_args: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        at_least_1 = ("tp_size", "max_running_requests", "samples_per_request")
        check_bounds("rollout_fleet.sglang.", self, max_total_tokens=">= 0", **dict.fromkeys(at_least_1, ">= 1"))

    def dtype_on(self, device: EngineDevice) -> str:
        """Return the name of the dtype that a server on ``device`` uses. The result is never ``auto``.

        Raises `ValueError` for float32 on CUDA.
        """
        on_cuda = device is EngineDevice.cuda
        if on_cuda and self.dtype in FLOAT32_NAMES:
            raise ValueError(
                f"rollout_fleet.sglang.dtype must be auto, bfloat16 or float16 with rollout_fleet.device=cuda, got "
                f"{self.dtype}: SGLang's attention kernels support only 16-bit types; use auto (bfloat16 on CUDA)"
            )
        if self.dtype == "auto":
            return "bfloat16" if on_cuda else "float32"
        return self.dtype


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """Options of the engine that runs transformers in the worker's process.

    Attributes:
        dtype: Dtype of weights and activations, by its name in torch. ``auto`` is the dtype of the stored model.
        max_rows: Largest number of samples in one batch. Other samples wait for the next batch.
        reproducible: Sample every answer from its own seed, so an interrupted answer continues with the same tokens.
            This is slow, and meant for tests. Answers in episodes with an environment get no seeds.
    """

    dtype: str = "auto"
    max_rows: int = 256
    reproducible: bool = False

    def __post_init__(self) -> None:
        check_bounds("rollout_fleet.transformers.", self, max_rows=">= 1")


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """Selects the samples that are saved as text in the run's folder ``samples/``. ``asyncrl samples RUN`` shows them.

    Attributes:
        every_steps: Learner steps between two sets of training samples; 0 saves none. Evaluations save all their
            samples.
        num_groups: Number of prompt groups that each engine saves in one set.
        num_shown: Number of samples of a set that the terminal shows. Half are the best, half the worst.
    """

    every_steps: int = 10
    num_groups: int = 4
    num_shown: int = 2

    def __post_init__(self) -> None:
        check_bounds("rollout_fleet.samples.", self, every_steps=">= 0", num_groups=">= 1", num_shown=">= 0")


@dataclass(frozen=True, kw_only=True)
class RolloutFleetConfig:
    """Options of the rollout fleet.

    Attributes:
        engine: Kind of the engines.
        device: Where the engines compute. ``auto``: on CUDA if there are enough GPUs for learner and engines, else on
            the CPU.
        num_engines: Number of rollout workers; each has one engine. ``{min: 2, max: 8}`` is an elastic fleet. The run
            starts when ``min`` engines are ready. Later, engines may join (up to ``max``) and leave.
        min_engines: The run ends if failed engines are not replaced and fewer engines than this are left. An elastic
            fleet first waits ``no_engine_timeout_s`` for other engines to join.
        no_engine_timeout_s: Longest time that training may wait while no engine is up.
        groups_in_flight: Largest number of prompt groups that one worker generates at the same time. With
            ``{min: 4, max: 64}``, this number adapts to the load that the engine reports. In total, a worker has at
            most twice as many groups, or ``environment.max_groups``. The total includes groups that are being scored or
            stored, and groups that wait for tools.
        reward: ``exact_match``, ``last_number``, ``final_answer``, ``numeric``, ``math_verify``, ``code``, ``judge``,
            ``format``, ``length``, ``environment``, or your own as ``file.py:function`` or ``module:function``, called
            as reward(prompt, response_text) -> float (docs/rewards.md).
        rewards: Several rewards instead of ``reward``, each as NAME or WEIGHT*NAME. A trajectory earns their weighted
            sum. Example: ``[exact_match,0.2*mine.py:format]``.
        rewards_by_source: Rewards for the prompts of each named data source, in the form of ``rewards``. Other prompts
            get ``rewards`` or ``reward``. Example: ``{gsm8k: [math_verify], apps: [code, 0.1*length]}``.
        reward_options: Options of each reward, by the reward's name in reports. Example: ``{length: {max_tokens: 512,
            buffer_tokens: 128}}``.
        judge_model: Folder of a frozen model for the reward ``judge``, if ``reward_options.judge`` has no ``url``. Each
            rollout worker serves this model with SGLang on the CPU. ``${model.path}`` names the run's initial model. If
            the engines compute on GPUs, this option must be empty.
        pass_secrets: Secret environment variables that reward processes and inference servers get. Other secrets are
            withheld: ``*_TOKEN``, ``*_KEY``, ``*_SECRET``, ``*_PASSWORD``, ``AWS_*`` and further names that
            `rollout_fleet.engines.process_guard` lists. Example: ``[OPENAI_API_KEY]`` for a judge.
        reward_processes: Scoring processes per worker and reward; built-in rewards that cannot hang need none.
        reward_timeout_s: Deadline of a scoring process for one prompt group. With ``drop_trajectory``, the deadline
            starts again for the group's remaining responses after a response that hangs or ends the process.
        on_reward_failure: ``retry_group``: if the reward fails on one response, the attempt at its group fails.
            ``drop_trajectory``: only the response is dropped, and the learner trains on the group's other responses. At
            least two must remain. This may bias training, because a response's content can make the reward fail.
        max_attempts: A prompt group is dropped and counted after this many failed attempts, on all workers together. An
            attempt fails if the reward fails, if the engine fails, or if the engine aborts the group unexpectedly.
            ``environment.on_failure`` says when failed episodes make the attempt fail. Evictions do not count.
        max_failures_in_a_row: A worker ends after this many failed attempts without a stored group between them. If the
            reward failed in the last of these attempts, the whole run ends. Otherwise the worker is replaced.
        max_image_pixels: Largest number of pixels of an image. A larger image is scaled down with its aspect ratio. The
            model's own limit also holds. Example: 1048576 gives at most 1,024 tokens for patches of 16 pixels.
        start_timeout_s: Deadline for an engine to start and to generate its first tokens. A run adds a second per 100
            MB of the model.
        load_timeout_s: Deadline of one weight update on one engine, counted from the pause of generation. A second per
            100 MB of weights is added.
        silence_timeout_s: How long an engine with running requests may produce no token. The worker probes a
            silent engine in the last quarter of this time. An engine has failed if it does not answer the probe in this
            quarter, or if it is silent for three such times in a row.
        restarts: How often a failed engine or a dead worker is replaced within ``restart_window_s``. After the next
            failure it is not replaced. Other workers continue the lost worker's prompt groups after the saved tokens,
            unless ``save_progress=never``. 0 replaces nothing.
        restart_window_s: Seconds for which a failure counts towards ``restarts``.
        restart_backoff_s: Pause before the second replacement within ``restart_window_s``. Each further replacement
            doubles the pause, up to a minute.
        drain_timeout_s: How long running prompt groups may continue when the learner takes the device
            (``placement.colocated``). Then they are aborted, and continued after the weight update.
        stop_timeout_s: Deadline of each step of stopping a worker: aborting groups, giving groups back, killing the
            server.
        renew_every_s: Seconds between renewals of a worker's leases (its rights to generate groups); a third of
            ``buffer.lease_s`` is usual.
        save_progress: ``at_stop`` saves running groups when a worker stops, and another worker continues them.
            ``at_updates`` also aborts, saves and continues running groups at each weight update. Then a worker that
            dies loses only the tokens since the latest update. ``never`` saves nothing.
        environment: Code that calls the policy turn by turn, such as a game. By default a rollout is a single answer.
        sampling: How training rollouts are sampled.
        sampling_by_source: Other ``max_new_tokens``, ``stop`` and ``stop_token_ids`` for the prompts of a data source.
            ``max_new_tokens`` may only be smaller. Example: ``{gsm8k: {max_new_tokens: 256}}``.
        samples: Which samples are saved for reading.
        sglang: How SGLang servers are launched.
        transformers: Options of the engine ``transformers``.
        script: ``module:function`` that makes the answers of the scripted engine (`rollout_fleet.engines.scripted`).
    """

    engine: EngineKind = EngineKind.sglang
    device: EngineDevice = EngineDevice.auto
    num_engines: Any = 1
    min_engines: int = 1
    no_engine_timeout_s: float = 1800.0
    groups_in_flight: Any = 32
    reward: str = "exact_match"
    rewards: list[str] = field(default_factory=list)
    rewards_by_source: dict[str, list[str]] = field(default_factory=dict)
    reward_options: dict[str, Any] = field(default_factory=dict)
    judge_model: str = ""
    pass_secrets: list[str] = field(default_factory=list)
    reward_processes: int = 1
    reward_timeout_s: float = 30.0
    on_reward_failure: OnRewardFailure = OnRewardFailure.retry_group
    max_attempts: int = 4
    max_failures_in_a_row: int = 64
    max_image_pixels: int = 1024 * 1024
    start_timeout_s: float = 300.0
    load_timeout_s: float = 60.0
    silence_timeout_s: float = 60.0
    restarts: int = 3
    restart_window_s: float = 600.0
    restart_backoff_s: float = 1.0
    drain_timeout_s: float = 600.0
    stop_timeout_s: float = 2.0
    renew_every_s: float = 20.0
    save_progress: SaveProgress = SaveProgress.at_stop
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sampling_by_source: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    transformers: TransformersConfig = field(default_factory=TransformersConfig)
    script: str = "rollout_fleet.engines.scripted:repeat_last_token"

    @property
    def is_elastic(self) -> bool:
        """Whether engines may join and leave the run while it runs (``num_engines`` is ``{min: …, max: …}``)."""
        return isinstance(self.num_engines, Mapping)

    @property
    def num_reserved_positions(self) -> int:
        """Number of token positions at the end of the model's context length that the engine never fills."""
        return SGLANG_RESERVED_POSITIONS if self.engine is EngineKind.sglang else 0

    @property
    def fewest_engines(self) -> int:
        """Number of engines that a run starts with: ``num_engines``, or its ``min``."""
        return _bounds(self.num_engines)[0]

    @property
    def most_engines(self) -> int:
        """Largest number of engines that a run may have at the same time: ``num_engines``, or its ``max``."""
        return _bounds(self.num_engines)[1]

    @property
    def fewest_groups_in_flight(self) -> int:
        """Lower bound for the number of prompt groups that a worker generates at the same time.

        A worker starts with this number.
        """
        return _bounds(self.groups_in_flight)[0]

    @property
    def most_groups_in_flight(self) -> int:
        """Upper bound for the number of prompt groups that a worker generates at the same time."""
        return _bounds(self.groups_in_flight)[1]

    @property
    def needs_server_tokenizer(self) -> bool:
        """Whether an SGLang server must load the tokenizer. Stop texts, JSON schemas and environments need it."""
        samplings = [self.sampling, *map(self.sampling_for, self.sampling_by_source)]
        asks = any(sampling.stop or sampling.json_schema for sampling in samplings)
        return bool(self.sglang.tokenizer or self.environment.name or asks)

    @property
    def server_stop_timeout_s(self) -> float:
        """Largest number of seconds to kill an inference server and to clean up after this server."""
        return self.stop_timeout_s + CLEANUP_S

    @property
    def worker_stop_timeout_s(self) -> float:
        """Largest number of seconds to stop a rollout worker with its inference server."""
        return 2 * self.stop_timeout_s + self.server_stop_timeout_s + CLEANUP_S

    def update_timeout_s(self, num_bytes: int) -> float:
        """Return how many seconds a worker may take to load new weights of ``num_bytes`` bytes.

        This includes the time to copy the weights to the worker's machine, and to wait for running samples.
        """
        return 2 * load_limit_s(self.load_timeout_s, num_bytes) + self.drain_timeout_s

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each reward in the sum, by the reward's name.

        Data sources in ``rewards_by_source`` have their own weights.
        """
        return dict(map(_weighted, self.rewards)) or {self.reward: 1.0}

    @property
    def reward_names(self) -> list[str]:
        """The name of each reward that the run uses, in the form of the option ``rollout_fleet.reward``."""
        sources = (dict(map(_weighted, entries)) for entries in self.rewards_by_source.values())
        return list(dict.fromkeys(name for weights in (self.reward_weights, *sources) for name in weights))

    def weights_for(self, data_source: str) -> dict[str, float]:
        """Return the rewards for the prompts of a data source: a dict from the reward's name to its weight."""
        entries = self.rewards_by_source.get(data_source)
        return self.reward_weights if entries is None else dict(map(_weighted, entries))

    def sampling_for(self, data_source: str) -> SamplingConfig:
        """Return the sampling options for a data source: ``sampling``, changed by ``sampling_by_source``."""
        return replace(self.sampling, **self.sampling_by_source.get(data_source, {}))

    def _check_sampling(self) -> None:
        for source, own in self.sampling_by_source.items():
            where = f"rollout_fleet.sampling_by_source.{source}"
            if wrong := sorted(own.keys() - _BY_SOURCE):
                raise ValueError(
                    f"{where} may set only the options {sorted(_BY_SOURCE)}, got {wrong}: the learner computes all "
                    "log-probs under one temperature; set all other options in rollout_fleet.sampling"
                )
            if self.sampling_for(source).max_new_tokens > (most := self.sampling.max_new_tokens):
                raise ValueError(
                    f"{where}.max_new_tokens must be at most rollout_fleet.sampling.max_new_tokens={most}, the limit "
                    f"of all responses, got {own['max_new_tokens']}; raise this limit"
                )

    def options_of(self, reward: str) -> dict[str, Any]:
        """Return the keyword arguments of the reward function ``reward``: a copy of its entry in ``reward_options``."""
        return dict(self.reward_options.get(reward_label(reward), {}))

    def check_reward_options(self) -> None:
        """Raise `ValueError` if an entry of ``reward_options`` is wrong.

        The key must be the name of a reward that this run uses, and the value must be a mapping of options.
        """
        labels = [reward_label(name) for name in self.reward_names]
        for label, options in self.reward_options.items():
            if label not in labels or not isinstance(options, Mapping):
                raise ValueError(
                    f"each key of rollout_fleet.reward_options must be a reward of the run (one of {labels}), and each "
                    f"value a mapping of options, got {label}: {options}; correct the name, or add the reward"
                )

    def _check_rewards(self) -> None:
        for option, entries in {"rewards": self.rewards, **self.rewards_by_source}.items():
            where = option if entries is self.rewards else f"rewards_by_source.{option}"
            names = [reward_label(_weighted(entry, where)[0]) for entry in entries]
            if len(set(names)) < len(names):
                raise ValueError(f"rollout_fleet.{where} must have different names, got {names}; rename a function")
            if not entries and where != "rewards":
                raise ValueError(
                    f"rollout_fleet.{where} must name a reward, got none; name a reward, or remove this data source"
                )
        labels = [reward_label(name) for name in self.reward_names]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"rollout_fleet.rewards_by_source: any two rewards must have different names, got {labels}; rename a "
                "function"
            )

    def _check_judge(self) -> None:
        options = self.reward_options.get("judge")
        has_url = isinstance(options, Mapping) and bool(options.get("url"))
        if "judge" in self.reward_names and has_url == bool(self.judge_model):
            raise ValueError(
                "the reward judge needs either reward_options.judge.url (URL of a server) or rollout_fleet.judge_model "
                f"(a model that the run serves), got {'both' if has_url else 'none'}; set one of them"
            )
        if self.judge_model and "judge" not in self.reward_names:
            raise ValueError(
                f"rollout_fleet.judge_model must be empty without the reward judge, got {self.judge_model!r}; add "
                "judge to rollout_fleet.rewards"
            )

    def __post_init__(self) -> None:
        self._check_rewards()
        self._check_judge()
        self._check_sampling()
        at_least_1 = ("reward_processes", "max_attempts", "max_failures_in_a_row", "max_image_pixels")
        check_bounds("rollout_fleet.", self, **dict.fromkeys(at_least_1, ">= 1"))
        _check_bounds("num_engines", self.num_engines)
        _check_bounds("groups_in_flight", self.groups_in_flight)
        if isinstance(self.groups_in_flight, Mapping) and self.engine is EngineKind.transformers:
            raise ValueError(
                f"rollout_fleet.groups_in_flight must be a number with rollout_fleet.engine=transformers, got "
                f"{self.groups_in_flight}: this engine does not report its load"
            )
        if not 1 <= self.min_engines <= self.fewest_engines:
            raise ValueError(
                f"rollout_fleet.min_engines must be in 1..{self.fewest_engines}, because the run starts with "
                f"{self.fewest_engines} engines (rollout_fleet.num_engines={self.num_engines}), got {self.min_engines}"
            )
        check_bounds("rollout_fleet.", self, restarts=">= 0; 0 replaces nothing")
        check_bounds("rollout_fleet.", self, **{name: "> 0 seconds" for name in vars(self) if name.endswith("_s")})
        self._check_sglang()

    def _check_sglang(self) -> None:
        if self.engine is EngineKind.sglang:
            self.sglang.dtype_on(self.device)
        if self.sglang.on_update is not OnUpdate.keep:
            return
        if self.engine is not EngineKind.sglang:
            raise ValueError(
                f"rollout_fleet.sglang.on_update must be recompute with rollout_fleet.engine={self.engine}, got keep: "
                "this engine loads weights between two batches, while no sample runs"
            )
        if self.save_progress is SaveProgress.at_updates:
            raise ValueError(
                "rollout_fleet.sglang.on_update must be recompute with rollout_fleet.save_progress=at_updates, got "
                "keep: running samples are aborted at each update, and their cache is lost; set save_progress=at_stop"
            )


def _bounds(count: Any) -> tuple[int, int]:
    return (count["min"], count["max"]) if isinstance(count, Mapping) else (count, count)


def _check_bounds(name: str, count: Any) -> None:
    if not isinstance(count, Mapping):
        if type(count) is not int or count < 1:
            raise ValueError(f"rollout_fleet.{name} must be >= 1, got {count}")
        return
    bounds: list[Any] = [count.get("min"), count.get("max")]
    are_numbers = set(count) == {"min", "max"} and all(type(bound) is int for bound in bounds)
    if not are_numbers or not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(f"rollout_fleet.{name} must be a number or {{min: N, max: M}} with 1 <= N <= M, got {count}")


def reward_label(name: str) -> str:
    """Return the short name of a reward, for reports and options. Example: ``format`` for ``mine.py:format``."""
    return name.rpartition(":")[2]


def _weighted(entry: str, option: str = "rewards") -> tuple[str, float]:
    weight, _, name = entry.rpartition("*")
    try:
        number = float(weight or 1.0)
    except ValueError:
        number = math.nan
    if not name or not math.isfinite(number):
        raise ValueError(f"rollout_fleet.{option} must hold NAME or WEIGHT*NAME, got {entry!r}; example: 0.2*mine.py:f")
    return name, number
