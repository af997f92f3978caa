"""A group in flight: its requests to the engine, and the handling of the answers."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.core.errors import ReplayBufferError
from asyncrl.core.types import FinishReason, Lease, Prompt
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.engine import SampleOutput
from rollout_fleet.inflight import InflightGroup
from rollout_fleet.rewards import Scores

LEASE = Lease(
    prompt=Prompt(group_id=7, prompt_ids=np.array([3, 4], dtype=np.int32)),
    attempt=1,
    engine_version=1,
    deadline_version=2,
)


def written(num_tokens: int, version: int, finish_reason: FinishReason | None = None, token: int = 14) -> SampleOutput:
    return SampleOutput(
        token_ids=np.full(num_tokens, token, dtype=np.int32),
        logprobs=np.full(num_tokens, -float(version), dtype=np.float32),
        versions=np.full(num_tokens, version, dtype=np.int32),
        finish_reason=finish_reason,
    )


def begin(num_samples: int, **options) -> InflightGroup:
    return InflightGroup.begin(
        LEASE, num_samples=num_samples, **{"sampling": SamplingConfig(max_new_tokens=60), **options}
    )


def saved(*outputs: SampleOutput):
    """Return the progress of a group whose samples got the answers ``outputs``."""
    group = begin(len(outputs))
    for request, output in zip(group.next_requests(), outputs, strict=True):
        group.take(request.id, output)
    return group.progress()


def test_a_new_group_makes_one_request_per_sample():
    sampling = SamplingConfig(max_new_tokens=5, temperature=0.7)
    group = begin(3, sampling=sampling)
    requests = group.next_requests()
    assert all(request.prompt_ids is LEASE.prompt.prompt_ids for request in requests), (
        "the requests must share one array"
    )
    assert {request.sampling for request in requests} == {sampling}
    assert len({request.id for request in requests}) == 3
    assert group.outstanding == [request.id for request in requests]


def test_unfinished_samples_continue_and_finished_samples_do_not_change():
    group = begin(3, progress=saved(written(5, 1), written(0, 1), written(4, 2, FinishReason.stop)))
    assert (group.num_tokens, group.num_own_tokens) == (9, 0)
    first, second = group.next_requests()
    assert first.prompt_ids.tolist() == [3, 4, *[14] * 5]
    assert second.prompt_ids.tolist() == [3, 4]
    assert [request.sampling.max_new_tokens for request in (first, second)] == [55, 60]
    assert group.take(first.id, written(3, 3, FinishReason.stop)) == 3
    assert group.take(second.id, written(8, 3, FinishReason.length)) == 8
    answers = [episode.answer for episode in group.episodes]
    assert [answer.versions.tolist() for answer in answers] == [[1] * 5 + [3] * 3, [3] * 8, [2] * 4]
    assert [answer.logprobs.tolist() for answer in answers] == [[-1.0] * 5 + [-3.0] * 3, [-3.0] * 8, [-2.0] * 4]
    assert group.is_finished
    assert not group.outstanding
    assert (group.num_tokens, group.num_own_tokens) == (20, 11)


def test_a_saved_sample_of_the_maximum_length_is_not_requested_again():
    progress = saved(written(6, 1), written(2, 1, FinishReason.stop))
    group = begin(2, progress=progress, sampling=SamplingConfig(max_new_tokens=6))
    assert group.next_requests() == []
    assert [episode.answer.finish_reason for episode in group.episodes] == [FinishReason.length, FinishReason.stop]


def test_a_saved_sample_that_exceeds_a_new_length_limit_restarts_and_its_tokens_still_count():
    group = begin(1, progress=saved(written(7, 1)), sampling=SamplingConfig(max_new_tokens=6))
    (request,) = group.next_requests()
    assert request.prompt_ids.tolist() == [3, 4]
    group.take(request.id, written(2, 3, FinishReason.stop))
    assert (group.num_tokens, group.num_own_tokens) == (9, 2)
    assert group.scored(Scores(total=np.zeros(1, dtype=np.float32)), [0]).summary.num_tokens == 2


def test_a_group_that_was_cut_off_twice_has_new_request_ids():
    group = begin(1)
    ids = []
    for _ in range(3):
        (request,) = group.next_requests()
        ids.append(request.id)
        group.take(request.id, written(2, 1))
    assert len(set(ids)) == 3
    assert not group.is_finished
    assert group.num_tokens == 6


def test_request_ids_differ_for_every_group_attempt_and_sample():
    ids = set()
    for group_id, attempt in [(1, 0), (1, 11), (11, 1), (10**12, 1000), (1, 1000), (1, 100)]:
        lease = Lease(
            prompt=Prompt(group_id=group_id, prompt_ids=np.array([3], dtype=np.int32)),
            attempt=attempt,
            engine_version=0,
            deadline_version=0,
        )
        group = InflightGroup.begin(lease, num_samples=1100, sampling=SamplingConfig())
        ids |= {request.id for request in group.next_requests()}
    assert len(ids) == 6 * 1100


def test_the_greedy_baseline_is_the_last_sample_and_its_tokens_are_not_counted():
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_new_tokens=9)
    group = begin(2, sampling=sampling, greedy_baseline=True)
    *sampled, greedy = group.next_requests()
    assert {request.sampling for request in sampled} == {sampling}
    assert greedy.sampling == SamplingConfig(temperature=0.0, max_new_tokens=9)
    assert [group.take(request.id, written(3, 1, FinishReason.stop)) for request in sampled] == [3, 3]
    assert group.take(greedy.id, written(2, 1, FinishReason.stop, token=8)) == 0
    assert group.num_tokens == 6
    parts = {"format": np.array([0.25, 0.5, 1.0], dtype=np.float32)}
    record = group.scored(Scores(total=np.array([0.0, 1.0, 1.0], dtype=np.float32), parts=parts), [0, 1, 2])
    assert record.summary.metrics == (("reward.format", 0.375),)
    assert record.is_baseline.tolist() == [False, False, True]
    assert record.summary.num_tokens == 6
    assert record.summary.rewards == (0.0, 1.0, 1.0)
    assert [record.trained_mask(branch).sum() for branch in record.branches] == [3, 3, 0]
    assert group.progress().num_trajectories == 2


def test_a_group_restores_its_samples_from_saved_progress():
    samples = (written(3, 1), written(0, 1), written(2, 4, FinishReason.stop))
    progress = saved(*samples)
    assert progress.summary.num_tokens == 5
    for before, episode in zip(samples, begin(3, progress=progress).episodes, strict=True):
        after = episode.answer
        assert before.finish_reason is after.finish_reason
        for column in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(before, column), getattr(after, column))
    with pytest.raises(ReplayBufferError, match="group 7 has 3 samples, but this run takes 4"):
        begin(4, progress=progress)
    assert begin(2).progress() is None
