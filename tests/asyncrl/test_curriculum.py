"""A curriculum on the real buffer: the outcomes of groups, also of filtered ones, change what is trained."""

import json
from collections import Counter

from asyncrl.data import DataConfig, PromptStream
from asyncrl.run.resume import RepeatedPrompts, RunState
from buffer import Durability
from tests.asyncrl.test_resume import Letters
from tests.support.buffer_groups import AnyRole, rollout, running

REWARDS = {"easy": (1.0, 1.0), "mid": (0.0, 1.0), "hard": (0.0, 0.0)}
NUM_STEPS, SIZE = 20, 2


def stream_of(tmp_path, sampler: str) -> PromptStream:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}=", "ground_truth": [*REWARDS][n % 3], "source": "digits"} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(train_files=[str(path)], data_source_key="source", sampler=sampler)
    return PromptStream(config, Letters(), seed=0)


async def train(client: AnyRole, prompts: RepeatedPrompts, steps: range) -> Counter[str]:
    """Make the steps; returns the generated groups by the difficulty of their row."""
    generated: Counter[str] = Counter()
    for step in steps:
        while (await client.stats()).groups["stored"] < SIZE:
            outcomes = await client.enqueue(prompts.take(SIZE), wants_outcomes=prompts.wants_outcomes)
            prompts.note(outcomes)
            for lease in await client.lease(step, SIZE):
                generated[lease.prompt.ground_truth] += 1
                group = rollout(lease, rewards=REWARDS[lease.prompt.ground_truth])
                await client.put(group, data_source=lease.prompt.data_source)
        plan = await client.plan(step)
        assert {group.data_source for group in plan.groups} == {"digits"}
        await client.commit(step)
    return generated


async def test_a_curriculum_generates_the_groups_that_filters_keep(tmp_path):
    counts = {}
    for sampler in ("uniform", "difficulty"):
        async with running(groups_per_step=SIZE, max_lag=0, filters=["equal_rewards"]) as run:
            prompts = RepeatedPrompts(stream_of(tmp_path, sampler))
            counts[sampler] = await train(run.client(), prompts, range(NUM_STEPS))
    shares = {sampler: count["mid"] / count.total() for sampler, count in counts.items()}
    assert shares["uniform"] < 0.45
    assert shares["difficulty"] > 0.6, counts


async def test_a_curriculum_continues_from_the_state_of_a_checkpoint_with_the_same_prompts(tmp_path):
    async def lives(name: str, *, restarts: bool) -> list[int]:
        kept = {"durability": Durability.disk, "directory": str(tmp_path / name)}
        prompts, start = RepeatedPrompts(stream_of(tmp_path, "difficulty")), 0
        while start < 12:
            async with running(groups_per_step=SIZE, max_lag=0, filters=["equal_rewards"], **kept) as run:
                client = run.client()
                for end in (start + 3,) if restarts else range(3, 13, 3):
                    await train(client, prompts, range(start, end))
                    prompts.note(await client.enqueue([], wants_outcomes=True))  # as for a checkpoint
                    start = end
            if restarts:
                state = RunState(prompts=json.loads(json.dumps(prompts.state())))
                prompts = RepeatedPrompts(stream_of(tmp_path, "difficulty"), state)
        return list(prompts.state()["chosen"])

    assert await lives("many", restarts=True) == await lives("one", restarts=False)
