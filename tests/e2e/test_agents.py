"""Agents train on SGLang with a tool loop over the episode's HTTP endpoint."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from rollout_fleet.episodes.calculator import calculate
from tests.e2e.run_checks import (
    assert_every_token_is_accounted_for,
    assert_trained_tokens_have_the_log_prob_of_their_version,
    trained_samples,
)
from tests.support.training_run import RunningTraining

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]

SHORT = [
    "experiment=tools",
    "total_steps=4",
    "sft.max_steps=80",
    "sft.eval_prompts=0",
    "algorithm.groups_per_step=4",
    "algorithm.samples_per_prompt=4",
    "rollout_fleet.groups_in_flight=4",
    "data.eval_max_prompts=8",
    "learner.keep_snapshots=-1",
    "record_trajectories=true",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    running = RunningTraining(tmp_path_factory.mktemp("agents"), *SHORT)
    try:
        assert running.finish(timeout_s=380) == 0, running.output
        yield running
    finally:
        running.end()


def test_every_token_is_accounted_for_over_several_turns(run):
    assert_every_token_is_accounted_for(run)
    (last,) = [line for line in run.lines if "held out, policy version 4" in line]
    assert "(8 prompts)" in last


def test_every_trained_token_has_the_log_prob_of_its_version(run):
    assert assert_trained_tokens_have_the_log_prob_of_their_version(run, every=4) > 50


def test_each_calculator_answer_matches_the_question_of_the_policy(run):
    tokenizer = AutoTokenizer.from_pretrained(next(run.output_dir.glob("*/assets/*/model")))
    num_calls = 0
    for row in trained_samples(run):
        ids, mask = np.asarray(row["response_ids"]), np.asarray(row["response_mask"])
        stretches = np.split(ids, np.flatnonzero(np.diff(mask)) + 1)
        # Decode without special tokens, because the agent gets texts without special tokens.
        texts = [tokenizer.decode(stretch, skip_special_tokens=True) for stretch in stretches]
        assert mask[0], "the first tokens must be the policy's"
        for asked, answered in zip(texts[0::2], texts[1::2], strict=False):
            num_calls += 1
            assert answered == f">{calculate(asked.removeprefix('?'))}="
    assert num_calls > 10
