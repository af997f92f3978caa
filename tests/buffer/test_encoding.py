"""Encoding of groups and prompts as payload frames: every column is decoded again, and wrong frames are refused."""

from __future__ import annotations

from dataclasses import fields, replace

import msgpack
import numpy as np
import pytest

from asyncrl.core.errors import WireError
from asyncrl.core.images import Image, PlacedImage
from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import Prompt
from asyncrl.single_controller import codec
from buffer.encoding import group_frames, group_of, pack, prompt_frames, prompt_of, unpack
from tests.support.buffer_groups import chat_prompt, prompt


def grouped(num_tokens: int = 4) -> TrajectoryGroup:
    answer = Turn(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        parent=0,
        sampled=True,
        logprobs=np.full(num_tokens, -0.5, dtype=np.float32),
        versions=np.full(num_tokens, 3, dtype=np.int32),
        columns={"routed_experts": np.arange(num_tokens * 6, dtype=np.int16).reshape(num_tokens, 3, 2)},
    )
    image = Image(pixels=np.full((4, 12), 7, dtype=np.uint8), grid=(1, 2, 2), merge_size=2, digest="d")
    seen = (PlacedImage(image=image, offset=1),)
    tree = Trajectory(
        turns=(Turn.given(np.array([1, 2], dtype=np.int32), images=seen), answer),
        reward=1.0,
        turn_rewards={1: 0.5},
        metrics={"tool_calls": 2.0},
    )
    return TrajectoryGroup.from_trajectories([tree, tree], group_id=5, attempt=1)


@pytest.mark.parametrize("num_tokens", [4, 100_000])
def test_every_column_of_the_schema_is_encoded_and_decoded(num_tokens: int) -> None:
    group = grouped(num_tokens)
    received = group_of([bytes(frame) for frame in group_frames(group)])
    assert (received.group_id, received.attempt, received.summary) == (5, 1, group.summary)
    np.testing.assert_array_equal(received.turns, group.turns)
    for scope in ("token_columns", "trajectory_columns", "turn_columns", "image_columns"):
        sent, got = getattr(group, scope), getattr(received, scope)
        assert list(sent) == list(got)
        for name in sent:
            assert sent[name].dtype == got[name].dtype
            np.testing.assert_array_equal(sent[name], got[name])
            assert not got[name].flags.writeable
    assert received.token_columns["routed_experts"].shape == (2 + 2 * num_tokens, 3, 2)


def test_every_field_of_a_prompt_is_encoded_and_decoded() -> None:
    sent = chat_prompt(7)
    got = prompt_of([bytes(frame) for frame in prompt_frames(sent)])
    assert got.prompt_ids.tolist() == sent.prompt_ids.tolist()
    for name in (each.name for each in fields(Prompt) if each.name != "prompt_ids"):
        assert getattr(sent, name), f"the test's prompt has no {name}"
        assert getattr(got, name) == getattr(sent, name)


def test_a_prompt_of_an_earlier_release_has_no_messages() -> None:
    values = {"group_id": 3, "prompt_ids": np.arange(2, dtype=np.int32), "ground_truth": "x"}
    old = prompt_of(pack(codec.encode(values | {"data_source": "", "extra": {}})))
    assert (old.messages, old.tools, old.environment, old.environment_options) == ((), (), "", {})
    assert prompt(3).messages == ()


def test_a_column_of_python_objects_cannot_be_encoded() -> None:
    group = grouped()
    bad = replace(group, turn_columns={"notes": np.array(["a", "b", None], dtype=object)})
    with pytest.raises(TypeError, match="column 'notes'"):
        group_frames(bad)


@pytest.mark.parametrize(
    "change",
    [
        lambda frames: frames[:-1],
        lambda frames: [*frames, b"more"],
        lambda frames: [frames[0], frames[1][:-4], *frames[2:]],
        lambda frames: [frames[0], b"\xff" * len(frames[1]), *frames[2:]],
        lambda frames: [b"grp\x01" + frames[0][4:], *frames[1:]],
        lambda frames: [frames[0][:-3], *frames[1:]],
        lambda frames: [b"grp\x03" + msgpack.packb((5, 1, [[], [], [], []])), frames[1]],
        lambda frames: [b"grp\x03" + msgpack.packb((5, 1, [7])), *frames[1:]],
    ],
)
def test_frames_that_are_not_a_group_are_refused(change) -> None:
    frames = [bytes(frame) for frame in unpack(group_frames(grouped()))]
    assert group_of(pack(frames)).group_id == 5
    with pytest.raises(WireError):
        group_of(pack(change(frames)))
