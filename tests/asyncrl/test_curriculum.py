"""A curriculum on the real buffer: the outcomes of groups change the order of training."""

import json
from collections import Counter

from asyncrl.data import DataConfig, PromptStream
from asyncrl.run.resume import Resumed, RunState, take_up
from buffer import Durability
from learner.checkpoint_folder import checkpoint_path, part_of
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


async def train(client: AnyRole, prompts: PromptStream, steps: range) -> Counter[str]:
    """Run the learner steps with the numbers ``steps``. Returns the number of generated groups per difficulty."""
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
            prompts = stream_of(tmp_path, sampler)
            counts[sampler] = await train(run.client(), prompts, range(NUM_STEPS))
    shares = {sampler: count["mid"] / count.total() for sampler, count in counts.items()}
    assert shares["uniform"] < 0.45
    assert shares["difficulty"] > 0.6, counts


async def test_a_curriculum_continues_from_the_state_of_a_checkpoint_with_the_same_prompts(tmp_path):
    async def lives(name: str, *, restarts: bool) -> list[int]:
        kept = {"durability": Durability.disk, "directory": str(tmp_path / name)}
        prompts, start = stream_of(tmp_path, "difficulty"), 0
        while start < 12:
            async with running(groups_per_step=SIZE, max_lag=0, filters=["equal_rewards"], **kept) as run:
                client = run.client()
                for end in (start + 3,) if restarts else range(3, 13, 3):
                    await train(client, prompts, range(start, end))
                    # For a checkpoint, the run calls `enqueue` without prompts, to get the outcomes of finished groups.
                    prompts.note(await client.enqueue([], wants_outcomes=True))
                    start = end
            if restarts:
                state = json.loads(json.dumps(prompts.state()))
                prompts = stream_of(tmp_path, "difficulty")
                prompts.restore(state)
        return list(prompts.state()["chosen"])

    assert await lives("many", restarts=True) == await lives("one", restarts=False)


async def test_a_curriculum_with_two_uses_per_group_continues_exactly_from_a_checkpoint(tmp_path):
    """As in a run, a checkpoint is saved between a step's plan and its commit. It has the ledger and the sampler."""
    options = {"groups_per_step": SIZE, "max_lag": 2, "max_uses": 2, "filters": ["equal_rewards"]}

    async def step_of(client: AnyRole, prompts: PromptStream, step: int) -> list[tuple[int, int]]:
        """Generate groups one at a time until the step's batch is full, and plan the step.

        Returns a pair for each planned group: its id, and how often earlier steps have trained it.
        """
        while (await client.stats()).groups["stored"] < SIZE:
            prompts.note(await client.enqueue(prompts.take(1), wants_outcomes=True))
            for lease in await client.lease(step, 1):
                await client.put(rollout(lease, rewards=REWARDS[lease.prompt.ground_truth]))
        return [(group.group_id, group.num_uses) for group in (await client.plan(step)).groups]

    async def lives(*ends: int) -> tuple[list[list[tuple[int, int]]], dict, dict]:
        """Run until the first step in ``ends``, then resume from a checkpoint until each of the other steps."""
        planned, resumed, account = [], None, {}
        for life, end in enumerate(ends):
            prompts = stream_of(tmp_path, "difficulty")
            if resumed:
                prompts.restore(resumed.state.prompts)
            begin = {"checkpoint": str(resumed.buffer_part)} if resumed else {}
            async with running(**options, **begin) as run:
                client = run.client()
                if resumed:
                    resumed = await take_up(client, resumed)
                    prompts.repeat_unfinished(await client.finished())
                for step in range(len(planned), end):
                    planned.append(await step_of(client, prompts, step))
                    if step == end - 1:
                        folder = checkpoint_path(tmp_path / f"life-{len(ends)}-{life}", end)
                        await client.checkpoint(part_of(folder, "buffer"), end, key=str(end))
                        prompts.note(await client.enqueue((), wants_outcomes=True))
                        generated = (await client.stats()).num_tokens
                        state = {"prompts": prompts.state(), "tokens_generated": generated, "lineage": "one"}
                        values = RunState(version=end, key=str(end), **state).to_dict()
                        resumed = Resumed(checkpoint=folder, state=RunState.from_dict(json.loads(json.dumps(values))))
                    await client.commit(step)
                stats = await client.stats()
                account = {
                    name: getattr(stats, name)
                    for name in ("num_tokens", "tokens_trained", "tokens_reused", "tokens_dropped", "tokens_buffered")
                } | {"lags": stats.lag_histogram, "groups_reused": stats.groups_reused}
        return planned, account, dict(resumed.state.prompts)

    planned, account, sampler = await lives(13)
    assert account["groups_reused"] > 0
    assert account["tokens_dropped"], "filters must have dropped groups"
    assert any(uses for step in (4, 9) for _, uses in planned[step]), "a checkpoint must hold trained groups"
    assert await lives(4, 9, 13) == (planned, account, sampler)
