"""Plays the episodes (rollouts with an environment) of one rollout worker. Environments run in child processes."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from asyncrl.core.image_files import ImageReader
from asyncrl.core.types import Prompt
from rollout_fleet.config import RolloutFleetConfig, SamplingConfig
from rollout_fleet.metrics import EpisodeCount

from .config import OnFailure, OnSamplingOption
from .endpoint import Endpoint
from .environment import EpisodeFailure, FailureKind, Outcome
from .environment_processes import EnvironmentProcesses
from .episode import PROMPT, EpisodeBudget
from .episode_run import EpisodeRun
from .renderer import ChatRenderer, load_renderer
from .session import Session, SessionCounts

logger = logging.getLogger(__name__)


class EpisodePlayer:
    """Plays episodes. The environment's name is in the prompt's row of the data, otherwise in the options.

    `close` may be called at any time.

    Args:
        max_context: Largest number of tokens on a path of an episode, from the start of the prompt to the path's end.
        images: Reads the images in messages; None if the model takes no images.
    """

    def __init__(
        self, config: RolloutFleetConfig, *, model_path: str, max_context: int, images: ImageReader | None = None
    ) -> None:
        self._images = images
        self._config = config
        self._model_path = model_path
        self._max_context = max_context
        self._processes = EnvironmentProcesses(config)
        self._endpoint = Endpoint()
        self._renderer: ChatRenderer | None = None

    @property
    def budget(self) -> EpisodeBudget:
        """The limits of each episode, from the options: turns, tokens and context length (`Player.budget`)."""
        options, sampling = self._config.environment, self._config.sampling
        return EpisodeBudget(
            max_turns=options.max_turns,
            max_tokens=options.max_tokens or options.max_turns * sampling.max_new_tokens,
            max_context=self._max_context,
            max_tree_tokens=options.max_tree_tokens,
        )

    def plays(self, prompt: Prompt) -> bool:
        """Return whether the prompt's row of the data, or the run, names an environment (`Player.plays`)."""
        return bool(prompt.environment or self._config.environment.name)

    def scores(self, failure: EpisodeFailure) -> bool:
        """Return whether ``environment.on_failure`` is ``score`` for the kind of this failure (`Player.scores`)."""
        return getattr(self._config.environment.on_failure, failure.kind) == OnFailure.score

    @property
    def counts(self) -> Counter[str]:
        """Number of events of each kind so far, by the kind's name in `EpisodeCount` (`Player.counts`)."""
        endpoint = self._endpoint.counts
        of_endpoint = {
            EpisodeCount.unknown_keys: endpoint.unknown_keys,
            EpisodeCount.closed_keys: endpoint.closed_keys,
            EpisodeCount.lost_answers: endpoint.lost,
            EpisodeCount.error_answers: endpoint.errors.total(),
        }
        return Counter({str(name): self._processes.counts[name] for name in EpisodeCount} | of_endpoint)

    async def start(self) -> None:
        """Choose the renderer, start the HTTP server and the child processes, and load the run's environment.

        The first error is raised, and the later steps are skipped.
        """
        self._renderer = load_renderer(self._model_path, self._config.environment.renderer)
        await self._endpoint.start()
        await self._processes.start()

    async def close(self) -> None:
        """End the child processes and the HTTP server of the policy."""
        await self._processes.close()
        await self._endpoint.close()

    async def play(self, prompt: Prompt, run: EpisodeRun, *, sampling: SamplingConfig, index: int) -> None:
        """Run the environment of one episode to its end, and set the outcome or failure of ``run`` (`Player.play`)."""
        assert self._renderer is not None
        name = prompt.environment or self._config.environment.name
        refuses = self._config.environment.sampling is OnSamplingOption.refuse
        options: dict[str, Any] = {"refuses": refuses, "on_calls": run.called, "images": self._images}
        session = Session(run, self._renderer, sampling=sampling, prompt=prompt, **options)
        access = self._endpoint.open(session)
        try:
            if not await self._processes.is_replayable(name, prompt.environment_options):
                run.start_afresh()
            outcome = await self._processes.run(
                prompt, access, sample=index, name=name, options=prompt.environment_options, on_tool=run.tool
            )
            _check_turns(run, outcome)
            run.outcome = outcome
        except EpisodeFailure as failure:
            run.failure = failure
            # Most clients' errors lack the code of an overflow, so ask the session whether the episode overflowed.
            if failure.kind is FailureKind.environment and session.overflow:
                run.failure = EpisodeFailure(FailureKind.overflow, f"{failure}; its last request: {session.overflow}")
            self._processes.counts[EpisodeCount(f"failed_{run.failure.kind}")] += 1
            logger.warning("environment %s, prompt group %d, sample %d: %s", name, prompt.group_id, index, run.failure)
        finally:
            self._endpoint.close_session(access.api_key)
            run.metrics = session_metrics(run, session.counts)


def session_metrics(run: EpisodeRun, counts: SessionCounts) -> dict[str, float]:
    """Return the metrics of one episode by name. docs/metrics.md describes them (``episode.NAME``)."""
    later = run.later_prompts
    return {
        **({"episode.prefix_hits": later.num_cached / later.num_tokens} if later.num_tokens else {}),
        "episode.turns": float(len(run.episode.sampled)),
        "episode.branches": float(counts.branches.total()),
        "episode.repeated_requests": float(counts.repeated),
        "episode.malformed_calls": float(counts.malformed_calls),
        "episode.reused_prompt": counts.reused_tokens / max(1, counts.prompt_tokens),
        "episode.retokenised_tokens": float(counts.retokenised_tokens),
        "episode.replayed_tokens": float(run.episode.num_replayed),
        "episode.dropped_tokens": float(run.episode.num_dropped),
    }


def _check_turns(run: EpisodeRun, outcome: Outcome) -> None:
    episode = run.episode
    without_reward = {PROMPT, *episode.running}
    strange = sorted(turn for turn in outcome.turn_rewards if turn in without_reward or not episode.is_known(turn))
    if strange:
        raise EpisodeFailure(
            FailureKind.reward,
            f"the environment of episode {episode.name} rewards turns {strange}, but each of these is the prompt, "
            "unfinished, dropped or unknown; use the index that came with an answer",
        )
