"""Held-out evaluation with scripted engines: the assignment of prompts, and the prompts of a lost engine."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.core.errors import EngineError, WorkerDiedError
from asyncrl.core.types import AnsweredPrompt, Prompt
from asyncrl.run.evaluator import HeldOutEvaluator, num_pinned_engines, slots_of_evaluation
from tests.support.ray_cluster import raised_by_ray

pytestmark = pytest.mark.usefixtures("virtual_time")
PROMPTS = [Prompt(group_id=index, prompt_ids=np.asarray([3], np.int32)) for index in range(40)]


class Engines:
    """A fleet that answers after ``takes_s`` seconds.

    After a given number of answers, an engine can fail or answer only one prompt per call.
    """

    def __init__(self, *names, takes_s=1.0, dies_after=None, leaves_after=None):
        self.names = names
        self.takes_s = takes_s
        self.dies_after, self.leaves_after = dies_after or {}, leaves_after or {}
        self.answered = Counter()
        self.running = Counter()
        self.most_running = Counter()

    def engines(self):
        return self.names

    async def answer(self, engine, prompts, *, version, num_samples):
        samples = len(prompts) * (num_samples + 1)
        self.running[engine] += samples
        self.most_running[engine] = max(self.most_running[engine], self.running[engine])
        await asyncio.sleep(self.takes_s)
        self.running[engine] -= samples
        if self.answered[engine] >= self.dies_after.get(engine, 1 << 30):
            raise raised_by_ray(WorkerDiedError(f"engine {engine} died\nits log"))
        if self.answered[engine] >= self.leaves_after.get(engine, 1 << 30):
            prompts = prompts[:1]
        self.answered[engine] += len(prompts)
        return [
            AnsweredPrompt(group_id=one.group_id, sampled=(1.0, 0.0), greedy=1.0, response_lengths=(4, 6, 5))
            for one in prompts
        ]


def evaluator_on(fleet, *overrides):
    options = ["evaluation.num_samples=2", "rollout_fleet.groups_in_flight=4", "algorithm.samples_per_prompt=6"]
    return HeldOutEvaluator(compose_run([*options, *overrides]), fleet=fleet, prompts=PROMPTS)


def pinned_to(*engines):
    """Return a stand-in for the function that waits for pinned engines. The stand-in always returns ``engines``."""

    async def pinned(known):
        if set(engines) == set(known):
            await asyncio.Event().wait()
        return set(engines)

    return pinned


async def test_every_prompt_is_answered_once_and_the_engines_share_them():
    fleet = Engines("0", "1")
    evaluation = await evaluator_on(fleet).evaluate_all(7)
    assert fleet.answered == {"0": 20, "1": 20}
    assert (evaluation.policy_version, evaluation.num_prompts, evaluation.num_missing) == (7, 40, 0)
    assert (evaluation.sampled, evaluation.greedy, evaluation.response_length) == (0.5, 1.0, 5.0)
    assert evaluation.estimates["pass@2"].mean == 1.0
    assert evaluation.shortfall == ""


@pytest.mark.parametrize("loss", ["dies_after", "leaves_after"])
async def test_unanswered_prompts_of_a_lost_engine_go_to_the_other_engines(loss):
    fleet = Engines("0", "1", **{loss: {"1": 10}})
    evaluation = await evaluator_on(fleet).evaluate_all(7)
    assert fleet.answered["0"] > 20
    assert sum(fleet.answered.values()) == 40
    assert (evaluation.num_missing, evaluation.incomplete) == (0, {})


async def test_an_evaluation_that_loses_all_engines_is_incomplete_and_names_the_cause():
    fleet = Engines("0", dies_after={"0": 10})
    evaluation = await evaluator_on(fleet).evaluate_all(7)
    assert (evaluation.num_prompts, evaluation.num_missing) == (40, 30)
    assert evaluation.shortfall == "; incomplete, 30 unanswered (engine 0: engine 0 died)"
    assert await evaluator_on(Engines("0", dies_after={"0": 0})).evaluate_all(7) is None
    assert await evaluator_on(Engines()).evaluate_all(7) is None, "an evaluation without engines must return None"


async def test_an_evaluation_during_training_keeps_to_its_share_of_engines_and_slots():
    config = compose_run(["rollout_fleet.groups_in_flight=4", "algorithm.samples_per_prompt=6"])
    expected = {1: (1, 6), 2: (1, 12), 4: (1, 24), 6: (1, 24), 8: (2, 24), 9: (2, 24)}
    for number, (engines, slots) in expected.items():
        assert num_pinned_engines(config.evaluation.share, number) == engines
        assert slots_of_evaluation(config, number) == slots
        assert number == 1 or engines <= 0.25 * number or engines == 1
        assert engines * slots <= 0.25 * number * 24
    fleet = Engines("0")
    await evaluator_on(fleet).evaluate_pinned(7, pinned_to("0"))
    assert fleet.most_running == {"0": 6}, "an evaluation must use a quarter of the engine's 24 slots"


async def test_an_engine_pinned_later_joins_the_evaluation_and_an_unpinned_engine_does_not():
    fleet = Engines("0", "1", "2", takes_s=2.0)
    joined = asyncio.Event()

    async def pinned(known):
        if known:
            await joined.wait()
            joined.clear()
        return {"0", "1"} if known else {"0"}

    call = asyncio.ensure_future(evaluator_on(fleet, "evaluation.share=1").evaluate_pinned(7, pinned))
    await asyncio.sleep(5)
    assert set(fleet.answered) == {"0"}
    joined.set()
    evaluation = await call
    assert set(fleet.answered) == {"0", "1"}
    assert evaluation.num_missing == 0


async def test_an_error_in_the_code_ends_the_evaluation():
    class Broken(Engines):
        async def answer(self, engine, prompts, *, version, num_samples):
            raise KeyError("a mistake in the code")

    with pytest.raises(BaseExceptionGroup):
        await evaluator_on(Broken("0")).evaluate_all(7)


async def test_an_engine_that_serves_another_version_gets_no_second_evaluation_call():
    class Behind(Engines):
        async def answer(self, engine, prompts, *, version, num_samples):
            if engine == "1":
                raise EngineError("the engine serves policy version 6, not 7")
            return await super().answer(engine, prompts, version=version, num_samples=num_samples)

    fleet = Behind("0", "1")
    assert (await evaluator_on(fleet).evaluate_all(7)).num_missing == 0
    assert fleet.answered == {"0": 40}
