"""The worker of the PPO example, in the form of verl's `ActorRolloutRefWorker`.

Ranks that share a sequence form an sp (sequence-parallel) group. Each sp group has one engine. The engine runs in a
thread of the group's first rank.
"""

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from asyncrl.config import RunConfig
from asyncrl.single_controller import DataProto, Dispatch, register
from learner import ActorWorker
from learner.roles import ACTOR, REFERENCE
from learner.verl_api import generated_rows
from learner.worker import BY_ROWS, ModelWorker
from rollout_fleet.engines import make_engine
from rollout_fleet.engines.engine import SampleOutput, SampleRequest


class ActorRolloutRefWorker(ActorWorker):
    """One rank of an actor with a rollout engine (``role="actor_rollout"``), or of a reference (``role="ref"``)."""

    def __init__(self, run: RunConfig, role: str, model_path: str, folder: str) -> None:
        is_actor, sampling = role == "actor_rollout", run.rollout_fleet.sampling
        options: dict[str, Any] = {"model_path": model_path, "total_steps": run.total_steps}
        options |= {"snapshot_dir": f"{folder}/snapshots"} if is_actor else {}
        ModelWorker.__init__(
            self,
            ACTOR if is_actor else REFERENCE,
            run.learner,
            run.algorithm,
            temperature=sampling.temperature,
            **options,
        )
        self.sampling, self.engine, self.loop = sampling, None, asyncio.new_event_loop()
        if is_actor and self.rank % run.learner.sp_size == 0:  # The first rank of each sp group has the engine.
            threading.Thread(target=self.loop.run_forever, daemon=True).start()
            places = {"rank": self.rank, "log_dir": folder, "seed": run.seed}
            self.engine = make_engine(run.rollout_fleet, model_path=model_path, **places)

    def on_engine(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        if self.engine is not None:
            self.on_engine(self.engine.start())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_mode(self, version: int) -> None:
        """Publish the actor's weights as ``version``, and move the actor's model and optimizer to host memory.

        After that, the engines load and verify the published weights. A reference model publishes nothing.
        """
        if self._publisher is None:
            return super().rollout_mode(version)
        offers = [self._publisher.publish(version).result()]  # Rank 0 gets an offer, other ranks get None.
        self.offload.enter_rollout()
        dist.broadcast_object_list(offers, src=0)
        if self.engine is not None:
            self.on_engine(self.engine.load_weights(offers[0]))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trainer_mode(self) -> None:
        """Free the engine's memory, and move the actor's model and optimizer back to the device, for training."""
        if self.engine is not None:
            self.on_engine(self.engine.release_memory())
        super().trainer_mode()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop(self) -> None:
        if self.engine is not None:
            self.on_engine(self.engine.stop())
        super().stop()

    @register(dispatch_mode=BY_ROWS)
    def generate_sequences(self, data: DataProto) -> DataProto | None:
        """Generate one response for each row of ``data``; return the batch with the responses.

        If ``meta_info["do_sample"]`` is False, the engine always takes the most probable token. A rank without an
        engine returns None.
        """
        if self.engine is None:  # The caller collects results only from ranks with an engine.
            return None
        sampling = self.sampling if data.meta_info.get("do_sample", True) else replace(self.sampling, temperature=0.0)
        rows = zip(data.batch["input_ids"].numpy(), data.batch["attention_mask"].numpy(), strict=True)
        requests = [
            SampleRequest(id=str(i), prompt_ids=ids[mask == 1].astype(np.int32), sampling=sampling)
            for i, (ids, mask) in enumerate(rows)
        ]

        async def sample() -> dict[str, SampleOutput]:
            return {request.id: answer async for request, answer in self.engine.generate(requests)}

        answers = self.on_engine(sample())
        samples = [(answers[request.id].token_ids, answers[request.id].logprobs) for request in requests]
        return generated_rows(data, samples, num_response=sampling.max_new_tokens)
