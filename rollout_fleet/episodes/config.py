"""Options of environments, with their defaults."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from asyncrl.core.errors import check_bounds


class OnFailure(StrEnum):
    """How a failed episode (a rollout with an environment) is handled.

    ``retry``: its whole prompt group is generated again. ``score``: reward functions score the text sampled so far.
    ``drop``: the learner trains on the group without the episode.
    """

    retry = "retry"
    score = "score"
    drop = "drop"


class OnSamplingOption(StrEnum):
    """What happens if a request differs from the run's sampling options: use the run's, or refuse the request."""

    override = "override"
    refuse = "refuse"


@dataclass(frozen=True, kw_only=True)
class OnFailureConfig:
    """How failed episodes are handled: one `OnFailure` (``retry``, ``score`` or ``drop``) per kind of failure.

    Attributes:
        environment: The environment raised an exception, hung, or ended its process.
        tool: A tool of the environment failed or exceeded ``tool_timeout_s``.
        reward: The environment's outcome is not valid. ``on_reward_failure`` is for reward functions that fail.
        overflow: The episode used up its turns, tokens or context, and the environment did not handle the error.
        infrastructure: The policy's HTTP endpoint failed, or no child process could be started for the environment.
    """

    environment: OnFailure = OnFailure.retry
    tool: OnFailure = OnFailure.retry
    reward: OnFailure = OnFailure.retry
    overflow: OnFailure = OnFailure.score
    infrastructure: OnFailure = OnFailure.retry


@dataclass(frozen=True, kw_only=True)
class RendererConfig:
    """How the messages of an episode become tokens (`rollout_fleet.episodes.renderer`).

    Attributes:
        name: ``auto`` selects a renderer of the library ``renderers`` that makes the same tokens as the model's chat
            template. If there is none, it selects the template. ``template`` always selects the template. Any other
            name is a renderer of that library. Example: ``qwen3``.
        tool_parser: The parser of tool calls with ``template``: a parser of ``renderers``, ``sglang:NAME``, or ``json``
            for ``<tool_call>{JSON}</tool_call>``. Empty: the first parser that reads a tool call as the chat template
            writes it.
        keep_reasoning: Keep sampled reasoning in the context even if the template drops it. Then reasoning never causes
            a new branch, but the contexts differ from those of the template.
        options: Arguments of the renderer or the template. Example: ``{"enable_thinking": false}``.
    """

    name: str = "auto"
    tool_parser: str = ""
    keep_reasoning: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Options of environments (code that calls the policy turn by turn).

    A rollout without an environment is a single answer.

    Attributes:
        name: A built-in adapter (``gym``, ``command``, ``openenv``, ``mcp``, ``verifiers``), or your own class or async
            function as ``file.py:Name`` or ``module:Name``. Empty: only the environments that rows of the data name.
        options: Keyword arguments of the environment. Example: ``{max_guesses: 7}``.
        python: Interpreter of the environment's processes, Python 3.11 or later. It does not need asyncrl's packages.
            Empty: the interpreter of the run.
        processes: Number of child processes per rollout worker.
        episodes_per_process: Number of episodes that one process runs at the same time.
        threads: Threads of numerical libraries per process: the value of ``OMP_NUM_THREADS`` and similar variables.
        memory_limit_gb: A process that uses more memory (with its children) is killed, and its episodes fail.
        max_turns: Largest number of sampled turns in an episode.
        max_tokens: Largest number of sampled tokens in an episode. 0: ``max_turns`` times ``sampling.max_new_tokens``.
        max_context: Largest number of tokens on a path of an episode, from the prompt to the path's end. 0: as many as
            the model's context and a micro-batch of each learner role can hold. SGLang reserves 6 positions of the
            context.
        max_tree_tokens: Largest number of tokens of all paths of an episode together; shared tokens are counted
            once per path; 0 is no limit. A loss, weight or mask that reads whole trajectories needs a limit, because
            the learner then reads all paths in one micro-batch.
        start_timeout_s: Deadline for a process to start, and for an environment to load.
        turn_timeout_s: Deadline of one request for a turn.
        tool_timeout_s: Deadline of one call of a tool.
        episode_timeout_s: Deadline of an episode, from its start in a process.
        blocked_timeout_s: A process is killed if its event loop is blocked for this long. Its episodes fail.
        on_failure: What happens with failed episodes, by the kind of the failure.
        sampling: What happens with sampling options of a request that differ from the run's. ``override``: the run's
            values replace them, tool calls are not forced, and tools that the API provider would run are left out. Each
            case is counted and named in a warning. ``refuse``: the request fails.
        renderer: How messages become tokens.
        max_groups: Largest number of prompt groups of a worker, including those that wait for tools; 0 is twice
            ``rollout_fleet.groups_in_flight``.
    """

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    python: str = ""
    processes: int = 1
    episodes_per_process: int = 64
    threads: int = 1
    memory_limit_gb: float = 8.0
    max_turns: int = 32
    max_tokens: int = 0
    max_context: int = 0
    max_tree_tokens: int = 0
    start_timeout_s: float = 120.0
    turn_timeout_s: float = 600.0
    tool_timeout_s: float = 60.0
    episode_timeout_s: float = 3600.0
    blocked_timeout_s: float = 60.0
    on_failure: OnFailureConfig = field(default_factory=OnFailureConfig)
    sampling: OnSamplingOption = OnSamplingOption.override
    renderer: RendererConfig = field(default_factory=RendererConfig)
    max_groups: int = 0

    def __post_init__(self) -> None:
        counts = ("processes", "episodes_per_process", "threads", "max_turns")
        deadlines = [name for name in vars(self) if name.endswith("_s")]
        check_bounds(
            "rollout_fleet.environment.",
            self,
            **dict.fromkeys(counts, ">= 1"),
            **dict.fromkeys(deadlines, "> 0 seconds"),
            memory_limit_gb="> 0",
            max_tokens=">= 0; 0 follows from max_turns and sampling.max_new_tokens",
            max_context=">= 0; 0 is what model and micro-batches hold",
            max_tree_tokens=">= 0; 0 is no limit",
            max_groups=">= 0; 0 follows from rollout_fleet.groups_in_flight",
        )
