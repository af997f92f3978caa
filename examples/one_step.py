"""One asynchronous learner step in one process, from the prompt to the loss and to the new weights in the engine.

A real run uses the same classes in separate processes, which work at the same time. Run this example with::

    python -m examples.one_step
"""

import asyncio
import os
import tempfile
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from asyncrl.cli.quickstart import make_assets
from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import Prompt
from asyncrl.data.config import DataConfig
from asyncrl.data.prompts import PromptStream
from asyncrl.weights.publish import WeightPublisher
from buffer.commands import Commit, Enqueue, GrantedLease, LeaseGroups, PlanBatch, Put
from buffer.ledger import Ledger
from buffer.rule import StalenessRule
from learner.advantages import BatchAdvantages
from learner.batching import rank_batches
from learner.config import AlgorithmConfig, Device, LearnerConfig
from learner.losses import policy_objective
from learner.model_shards import PretrainedShards
from learner.trainer import LearnerStep, Trainer
from learner.types import group_sequences
from rollout_fleet.config import EngineDevice, RolloutFleetConfig, SamplingConfig
from rollout_fleet.engines.engine import Engine, SampleRequest
from rollout_fleet.engines.transformers import TransformersEngine

NUM_GROUPS, NUM_SAMPLES, MAX_LAG = 4, 4, 1
SAMPLING = SamplingConfig(max_new_tokens=8)


async def one_step(folder: str) -> tuple[dict[str, float], Engine, Ledger]:
    """Make one learner step on a tiny model that is saved in ``folder``.

    Return the metrics of the step, the engine with the new weights, and the ledger (the states of all groups).
    """
    assets = make_assets(f"{folder}/assets", seed=0)
    model_path = str(assets.model)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    algorithm = AlgorithmConfig(groups_per_step=NUM_GROUPS, samples_per_prompt=NUM_SAMPLES)

    # Create trainer, engine and ledger (the states of all groups). The learner has one rank.
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    trainer = Trainer(LearnerConfig(device=Device.cpu), model_path=model_path, total_updates=1)
    fleet = RolloutFleetConfig(sampling=SAMPLING)
    engine = TransformersEngine(fleet, model_path=model_path, device=EngineDevice.cpu, rank=0, seed=0)
    await engine.start()
    ledger = Ledger(StalenessRule(max_lag=MAX_LAG, groups_per_step=NUM_GROUPS))
    store: dict[int, TrajectoryGroup] = {}

    # Put prompts into the queue. With max_lag 1, the engine may begin at most two batches before the first step.
    stream = PromptStream(DataConfig(train_files=[str(assets.train)], max_prompt_tokens=9), tokenizer, seed=0)
    prompts = {prompt.group_id: prompt for prompt in stream.take(3 * NUM_GROUPS)}
    ledger.apply(Enqueue(group_ids=tuple(prompts)))
    granted = ledger.apply(LeaseGroups(engine_version=engine.version, max_groups=len(prompts))).leases
    assert len(granted) == (MAX_LAG + 1) * NUM_GROUPS

    # Sample and score each group. Then tell the ledger (the states of all groups) that `store` has the group.
    for lease in granted:
        store[lease.group_id] = await rollout(engine, lease, prompts[lease.group_id], tokenizer)
        ledger.apply(Put(summary=store[lease.group_id].summary))

    # Plan step 0: the plan lists the ids, lengths and rewards of the step's groups. Convert these groups to sequences.
    ledger.apply(PlanBatch(version=0))
    plan = ledger.batch(version=0)
    (batch,) = rank_batches(plan, algorithm, num_shards=1, max_lag=MAX_LAG)
    sequences = [
        sequence
        for share in batch.shares
        for sequence in group_sequences(store[share.group_id], samples=share.samples, mini_batch=share.mini_batch)
    ]

    # Make the learner step: advantages, packing, forward pass, loss, backward pass, optimizer. Then commit the step.
    sequences, metrics = BatchAdvantages(algorithm, trainer.mesh).assign(sequences, batch.rewards)
    metrics |= LearnerStep(trainer, policy_objective(algorithm)).run(sequences)
    ledger.apply(Commit(version=0))

    # Publish the weights of version 1. Then the engine loads and verifies these weights.
    publisher = WeightPublisher(PretrainedShards.of(trainer), f"{folder}/snapshots", keep=1)
    offer = publisher.publish(ledger.learner_version).result()
    publisher.close()
    assert offer is not None  # Rank 0 gets an offer.
    await engine.load_weights(offer)

    # Now the engine may begin another batch. Samples of version 0 have a lag of 1 in step 1.
    assert len(ledger.apply(LeaseGroups(engine_version=engine.version, max_groups=99)).leases) == NUM_GROUPS
    ledger.apply(PlanBatch(version=1))
    assert {1 - group.oldest_version for group in ledger.batch(version=1).groups} == {MAX_LAG}
    await engine.stop()
    return metrics, engine, ledger


async def rollout(engine: Engine, lease: GrantedLease, prompt: Prompt, tokenizer: Any) -> TrajectoryGroup:
    """Sample and score one prompt group. Return the group with tokens and rewards.

    ``lease`` is the right to generate the group. The reward of a response is the fraction of correct digits.
    """
    requests = [
        SampleRequest(id=f"{lease.group_id}-{sample}", prompt_ids=prompt.prompt_ids, sampling=SAMPLING)
        for sample in range(NUM_SAMPLES)
    ]
    samples = [output async for _, output in engine.generate(requests)]
    texts = tokenizer.batch_decode([sample.token_ids for sample in samples], skip_special_tokens=True)
    rewards = [np.mean([text[i : i + 1] == digit for i, digit in enumerate(prompt.ground_truth)]) for text in texts]
    trajectories = [
        Trajectory(turns=(Turn.given(prompt.prompt_ids), sample.turn(parent=0)), reward=float(reward))
        for sample, reward in zip(samples, rewards, strict=True)
    ]
    return TrajectoryGroup.from_trajectories(trajectories, group_id=lease.group_id, attempt=lease.attempt)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(asyncio.run(one_step(temporary))[0])
