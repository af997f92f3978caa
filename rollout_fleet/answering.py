"""The parts of a rollout worker that answer prompts: the inference engine, rewards, environments and image reader."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from asyncrl.core.image_files import ImageReader, image_reader

from .config import EngineDevice, EngineKind, RolloutFleetConfig, SGLangConfig
from .engines import check_engine_installed, make_engine, resolve_device
from .engines.engine import Decode, Engine, load_decoder, read_model_facts
from .engines.sglang_server import SGLangServer
from .episodes.episode_run import Player
from .episodes.player import EpisodePlayer
from .reward_judge import KEY_VARIABLE, URL_VARIABLE
from .rewards import WeightedRewards
from .sample_log import SampleLog


@dataclass(frozen=True, kw_only=True)
class AnsweringParts:
    """An inference engine, and the objects that score, decode and save its answers.

    Attributes:
        engine: The inference engine. It samples the answers.
        rewards: The reward functions. They score the answers.
        decode: Function that converts the tokens of an answer to the text that reward functions read.
        player: Runs the environments that prompts name; None if no prompt has an environment.
        images: Reads the images of prompts; None if the model takes no images.
        samples: Saves some scored answers to files for people to read; None saves none.
        judge: Server of the model ``rollout_fleet.judge_model``, which the reward ``judge`` calls; None without such a
            model.
    """

    engine: Engine
    rewards: WeightedRewards
    decode: Decode
    player: Player | None = None
    images: ImageReader | None = None
    samples: SampleLog | None = None
    judge: SGLangServer | None = None

    @classmethod
    def of(
        cls,
        config: RolloutFleetConfig,
        *,
        model_path: str,
        seed: int,
        rank: int = 0,
        log_dir: str = "",
        episode_context: int = 0,
        sample_dir: str = "",
    ) -> Self:
        """Make a policy's inference engine and the engine's helpers, without starting them.

        Args:
            config: Options of the engine, the rewards and the environments.
            model_path: Folder of the policy with its tokenizer.
            seed: Random seed of the engine.
            rank: Number of the rollout worker, from 0. It is part of log and file names.
            log_dir: Folder of the engine's log.
            episode_context: Largest number of tokens on a path of an episode, from the start of the prompt to the
                path's end. 0 if no prompt has an environment.
            sample_dir: Folder for decoded samples that people read; empty to save none.

        Raises:
            ValueError: the engine is not installed, or the model or a reward function does not exist.
        """
        decode = load_decoder(model_path)
        images = image_reader(model_path, max_pixels=config.max_image_pixels)
        return cls(
            rewards=WeightedRewards(config),
            engine=make_engine(config, model_path=model_path, rank=rank, log_dir=log_dir, seed=seed),
            decode=decode,
            player=EpisodePlayer(config, model_path=model_path, max_context=episode_context, images=images)
            if episode_context
            else None,
            images=images,
            samples=SampleLog(Path(sample_dir), rank=rank, config=config.samples, decode=decode)
            if sample_dir
            else None,
            judge=_judge(config, rank=rank, log_dir=log_dir, seed=seed) if config.judge_model else None,
        )

    async def start(self) -> None:
        """Start the engine and its helpers, and return when all of them can be used."""
        beside = [part.start() for part in (self.samples, self.player, self.judge) if part is not None]
        await asyncio.gather(self.engine.start(), *beside)
        variables = {}
        if self.judge is not None:
            key = self.judge.headers["Authorization"].removeprefix("Bearer ")
            variables = {URL_VARIABLE: f"{self.judge.url}/v1", KEY_VARIABLE: key}
        await self.rewards.start(variables)

    async def close(self) -> None:
        """Stop the engine and its helpers.

        If one of them raises an error, all others are still stopped before the error is raised.
        """
        async with AsyncExitStack() as stack:  # when the block ends, the last function is called first
            if self.player is not None:
                stack.push_async_callback(self.player.close)
            if self.judge is not None:
                stack.push_async_callback(self.judge.stop)
            stack.push_async_callback(self.rewards.close)
            stack.push_async_callback(self.engine.stop)


def _judge(config: RolloutFleetConfig, *, rank: int, log_dir: str, seed: int) -> SGLangServer:
    if resolve_device(config) is not EngineDevice.cpu:
        raise ValueError(
            f"rollout_fleet.judge_model must be empty if the engines run on GPUs, got {config.judge_model!r}: the "
            "engines use the memory of the GPUs; serve the judge model elsewhere (python -m sglang.launch_server), "
            "and set reward_options.judge.url"
        )
    own = replace(config, engine=EngineKind.sglang, sglang=SGLangConfig(tokenizer=True))
    check_engine_installed(own)
    facts = read_model_facts(config.judge_model)
    return SGLangServer(
        own,
        model_path=config.judge_model,
        device=EngineDevice.cpu,
        rank=rank,
        log_dir=log_dir,
        seed=seed,
        head_dim=facts.head_dim,
        name="judge",
    )
