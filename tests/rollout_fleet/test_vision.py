"""Images on the rollout side: engines, requests to SGLang, sessions and episodes."""

import asyncio
import base64
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from asyncrl.core.errors import AsyncRLError, RequestRefused
from asyncrl.core.image_files import ImageReader, image_part, load_processor
from asyncrl.core.images import PlacedImage
from asyncrl.core.types import Prompt
from rollout_fleet.answering import AnsweringParts
from rollout_fleet.config import EngineDevice, EngineKind, RolloutFleetConfig, SamplingConfig
from rollout_fleet.engines import make_engine
from rollout_fleet.engines.engine import SampleRequest, check_prompt, read_model_facts
from rollout_fleet.engines.server_hooks import take_pixels
from rollout_fleet.engines.sglang import SGLangEngine
from rollout_fleet.engines.transformers import TransformersEngine
from rollout_fleet.episodes import anthropic_api, responses_api
from rollout_fleet.episodes.config import RendererConfig
from rollout_fleet.episodes.renderer import load_renderer
from rollout_fleet.episodes.session import ChatRequest, Session
from rollout_fleet.evaluation import HeldOutAnswers
from rollout_fleet.rewards import WeightedRewards
from tests.support.engine_probes import folder_of, publish_weights
from tests.support.rollout import InMemoryBuffer, make_loop
from tests.support.scripted_turns import ScriptedTurns
from tests.support.vision_models import as_png, picture, write_vision_model

IMAGE = 5  # id of the token that stands for one part of an image


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def reader(model_path):
    return ImageReader(model_path=model_path, max_pixels=4096)


def request_of(reader, name, *seeds, width=16, length=3, **sampling):
    """Return a request. Its prompt has one image per seed in ``seeds``, and ``length`` tokens before each image."""
    ids, images = [], []
    for seed in seeds:
        image = reader.image(as_png(picture(seed, width=width)), "image")
        ids += [*range(8, 8 + length), 3]
        images.append(PlacedImage(image=image, offset=len(ids)))
        ids += [IMAGE] * image.num_tokens + [4]
    return SampleRequest(
        id=name,
        prompt_ids=np.array([*ids, 9, 2], dtype=np.int32),
        sampling=SamplingConfig(max_new_tokens=6, **sampling),
        images=tuple(images),
    )


def forward_logprobs(model, reader, request, tokens):
    """Return the log-probs of ``tokens``, [number of tokens], from a forward pass of transformers over one sequence."""
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, tokens]).astype(np.int64))[None]
    seen = {}
    if request.images:
        pixels = np.concatenate([placed.image.pixels for placed in request.images])
        seen = {
            "pixel_values": reader.format.features(torch.from_numpy(pixels)),
            "image_grid_thw": torch.tensor([placed.image.grid for placed in request.images]),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    with torch.no_grad():
        logits = model(input_ids=ids, **seen).logits[0, len(request.prompt_ids) - 1 : -1]
    return F.log_softmax(logits, -1).gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None])[:, 0].numpy()


def make_requests(reader, name):
    """Return requests for four prompts.

    The first two prompts have equal tokens but different images, so an engine must not use the KV cache of one for the
    other. The third prompt has two images. The fourth prompt has only text.
    """
    return [
        *(request_of(reader, f"{name}-a-{i}", 0) for i in range(4)),
        *(request_of(reader, f"{name}-b-{i}", 1) for i in range(4)),
        *(request_of(reader, f"{name}-c-{i}", 2, 3, width=24, length=5) for i in range(2)),
        *(request_of(reader, f"{name}-d-{i}") for i in range(2)),
    ]


async def check_answers(engine, folder, reader, name, *, atol):
    """Check that the log-probs of each answer equal those of a forward pass with the weights in ``folder``."""
    requests = make_requests(reader, name)
    answers = {request.id: output async for request, output in engine.generate(requests)}
    model, differences = AutoModelForImageTextToText.from_pretrained(folder), []
    for request in requests:
        output = answers[request.id]
        assert set(output.versions.tolist()) == {engine.version}
        assert IMAGE not in output.token_ids[:-1]
        tokens = output.token_ids[:-1] if output.token_ids[-1] == IMAGE else output.token_ids
        expected = forward_logprobs(model, reader, request, tokens)
        differences += np.abs(output.logprobs[: len(tokens)] - expected).tolist()
    assert max(differences) < atol


async def test_log_probs_with_images_equal_a_forward_pass_before_and_after_a_load(model_path, reader, tmp_path):
    engine = TransformersEngine(RolloutFleetConfig(), model_path=model_path, device=EngineDevice.cpu, rank=0, seed=0)
    try:
        await engine.start()
        await check_answers(engine, model_path, reader, "before", atol=5e-5)
        offer = publish_weights(model_path, tmp_path, 1, 1.1)
        await engine.load_weights(offer)
        await check_answers(engine, folder_of(offer), reader, "after", atol=5e-5)
        name = "model.visual.patch_embed.proj.weight"
        spoiled = publish_weights(model_path, tmp_path, 2, change=lambda held: {**held, name: held[name] + 1})
        with pytest.raises(AsyncRLError, match=r"digest|differ|patch_embed"):
            await engine.load_weights(spoiled)
    finally:
        await engine.stop()


def test_an_image_placeholder_ends_a_turn_and_is_refused_without_its_image(model_path, reader):
    facts = read_model_facts(model_path)
    assert (facts.image_token_id, set(facts.eos_ids)) == (IMAGE, {2, IMAGE, 6})
    request = request_of(reader, "a", 0)
    check_prompt(request, facts.vocab_size, facts.image_token_id)
    for ids, images, message in (
        ([*request.prompt_ids, IMAGE, 9], request.images, r"differ at positions \[9\]"),
        (request.prompt_ids, (), r"belong to one of the 0 images"),
        (request.prompt_ids[:6], request.images, "not end the prompt|must belong to"),
    ):
        bad = SampleRequest(id="a", prompt_ids=np.array(ids, dtype=np.int32), sampling=SamplingConfig(), images=images)
        with pytest.raises(RequestRefused, match=message):
            check_prompt(bad, facts.vocab_size, facts.image_token_id)
    with pytest.raises(RequestRefused, match=r"request a has 1 images, .* train this model"):
        check_prompt(request, facts.vocab_size)


def test_a_request_to_sglang_has_pixels_that_the_server_turns_into_features(model_path, reader, tmp_path):
    engine = SGLangEngine(
        RolloutFleetConfig(), model_path=model_path, device=EngineDevice.cpu, rank=0, log_dir=str(tmp_path), seed=0
    )
    requests = [request_of(reader, "a", 0, 1), request_of(reader, "b")]
    body = engine.request_body(requests)
    assert body["image_data"][1] is None
    ((item,),) = body["image_data"][:1]
    assert item["offsets"] == [(placed.offset, placed.end - 1) for placed in requests[0].images]
    assert len(base64.b64decode(item["pixels"])) == 2 * 8 * 48
    server = types.SimpleNamespace(_processor=types.SimpleNamespace(image_processor=load_processor(model_path)))
    take_pixels(server, image_data=[item])
    pixels = np.concatenate([placed.image.pixels for placed in requests[0].images])
    torch.testing.assert_close(item["pixel_values"], reader.format.features(torch.from_numpy(pixels)))
    assert item["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 4]]
    assert {"pixels", "grids"}.isdisjoint(item)


def test_sglang_on_a_cpu_refuses_a_model_with_images(model_path, tmp_path):
    config = RolloutFleetConfig(engine=EngineKind.sglang, device=EngineDevice.cpu)
    with pytest.raises(ValueError, match=r"rollout_fleet\.engine is sglang on a CPU, .* takes images"):
        make_engine(config, model_path=model_path, rank=0, log_dir=str(tmp_path), seed=0)


@pytest.mark.slow  # imports SGLang
def test_sglang_accepts_a_request_with_images(model_path, reader, tmp_path):
    io_struct = pytest.importorskip("sglang.srt.managers.io_struct")
    engine = SGLangEngine(
        RolloutFleetConfig(), model_path=model_path, device=EngineDevice.cpu, rank=0, log_dir=str(tmp_path), seed=0
    )
    body = engine.request_body([request_of(reader, "a", 0, 1), request_of(reader, "b")])
    body["input_ids"] = [ids.tolist() for ids in body["input_ids"]]
    request = io_struct.GenerateReqInput(**body)
    request.normalize_batch_and_arguments()
    assert request[0].image_data == body["image_data"][0]
    assert not request[1].image_data


def image_of(seed):
    return image_part(as_png(picture(seed)))


def text_of(text):
    return {"type": "text", "text": text}


@pytest.fixture
def talk(model_path, reader):
    """Make a session whose policy always answers ``b``. Returns a pair: the scripted turns, and the session."""
    renderer = load_renderer(model_path, RendererConfig())
    messages = [{"role": "user", "content": [image_of(0), text_of("which colour?")]}]
    rendered = renderer.render([{"role": "user", "content": [{"type": "image"}, text_of("which colour?")]}], [])
    image = reader.image(as_png(picture(0)), "image")
    ids = [copy for token in rendered for copy in ([token] * (2 if token == IMAGE else 1))]
    images = (PlacedImage(image=image, offset=ids.index(IMAGE)),)
    turns = ScriptedTurns(ids, lambda ids, _: [12, 2], images=images)
    prompt = Prompt(group_id=7, prompt_ids=np.array(ids, dtype=np.int32), messages=tuple(messages))
    session = Session(turns, renderer, sampling=SamplingConfig(max_new_tokens=8), prompt=prompt, images=reader)
    return turns, session


async def test_a_session_continues_a_prompt_with_an_image_and_accepts_an_image_from_a_tool(talk):
    turns, session = talk
    messages = list(session.prompt.messages)
    (first,) = await session.chat(ChatRequest(messages=messages))
    assert turns.episode.turn(first.turn).parent == 0
    assert not session.counts.branches
    shown = {"role": "tool", "content": [text_of("zoomed"), image_of(1)], "tool_call_id": "x"}
    (second,) = await session.chat(ChatRequest(messages=[*messages, first.message, shown]))
    context = turns.episode.turn(turns.episode.turn(second.turn).parent)
    assert context.parent == first.turn
    assert not session.counts.branches
    assert len(context.images) == 1
    path = turns.episode.path(turns.episode.turn(second.turn).parent)
    for placed in turns.episode.images(turns.episode.turn(second.turn).parent):
        assert set(path[placed.offset : placed.end].tolist()) == {IMAGE}
    trajectory = turns.episode.trajectory(1.0)
    assert [len(turn.images) for turn in trajectory.turns] == [1, 0, 1, 0]


async def test_images_have_the_same_tokens_in_every_api(talk):
    _, session = talk
    url = image_of(0)["image_url"]["url"]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    shown, text = {"type": "image", "source": source}, text_of("which colour?")
    asked = anthropic_api.read_request({"messages": [{"role": "user", "content": [shown, text]}]})
    assert await session.count_tokens(asked) == len(session.prompt.prompt_ids)
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "which colour?"}]
    asked = responses_api.read_request({"input": [{"role": "user", "content": parts}]}, stored={})
    await session.chat(asked)
    assert not session.counts.branches, "the request must begin with the episode's prompt"
    call = {"type": "tool_use", "id": "x", "name": "zoom", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [shown]}
    answered = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    asked = anthropic_api.read_request({"messages": [{"role": "user", "content": [shown, text]}, *answered]})
    assert [[part["type"] for part in asked.messages[i]["content"]] for i in (0, 2)] == [["image", "text"], ["image"]]
    asked = responses_api.read_request(
        {"input": [{"type": "function_call_output", "call_id": "x", "output": parts}]}, stored={}
    )
    assert asked.messages[0]["content"] == parts


async def test_a_session_begins_a_branch_for_another_image_with_equal_text(talk):
    turns, session = talk
    other = [{"role": "user", "content": [image_of(1), text_of("which colour?")]}]
    (answer,) = await session.chat(ChatRequest(messages=other))
    context = turns.episode.turn(turns.episode.turn(answer.turn).parent)
    assert context.parent == -1
    assert context.token_ids.tolist() == turns.episode.turn(0).token_ids.tolist()
    assert session.counts.branches == {"new_root": 1}


async def test_a_session_refuses_images_that_it_cannot_use(talk, model_path):
    turns, session = talk
    for content, message in (
        ([{"type": "image_url", "image_url": {"url": "/etc/passwd"}}], r"messages\[0\].content\[0\] is '/etc/passwd'"),
        ([{"type": "image_url", "image_url": {"url": "http://host/a.png"}}], "download the image first"),
        ([image_of(0), text_of("<|image_pad|>")], "has 2 image placeholders"),
    ):
        with pytest.raises(ValueError, match=message):
            await session.chat(ChatRequest(messages=[{"role": "user", "content": content}]))
    text_only = Session(turns, session.renderer, sampling=SamplingConfig(), prompt=session.prompt)
    with pytest.raises(ValueError, match=r"messages\[0\]\.content has an image, .*no vision tower"):
        await text_only.chat(ChatRequest(messages=list(session.prompt.messages)))


async def test_the_loop_and_the_evaluation_send_the_images_of_prompts_to_the_engine(model_path, reader, tmp_path):
    ids = request_of(reader, "a", 0).prompt_ids
    prompts = [
        Prompt(group_id=i, prompt_ids=ids, ground_truth="b", messages=({"role": "user", "content": [image_of(i)]},))
        for i in range(2)
    ]
    engine = TransformersEngine(RolloutFleetConfig(), model_path=model_path, device=EngineDevice.cpu, rank=0, seed=0)
    await engine.start()
    buffer = InMemoryBuffer(prompts, groups_per_step=2)
    loop = make_loop(buffer, engine, images=reader, sampling=SamplingConfig(max_new_tokens=3))
    await loop.load_weights(publish_weights(model_path, tmp_path, 0))
    run = asyncio.create_task(loop.run())
    try:
        await buffer.commit()
        rewards = WeightedRewards(RolloutFleetConfig())
        held_out = HeldOutAnswers(
            AnsweringParts(engine=engine, rewards=rewards, decode=str, images=reader),
            sampling=lambda source: SamplingConfig(max_new_tokens=3),
        )
        answered = await held_out.answer(prompts, version=0, num_samples=1)
    finally:
        await loop.stop()
        await asyncio.gather(run, return_exceptions=True)
        await engine.stop()
    assert sorted(group.group_id for group in buffer.groups) == [0, 1]
    for group in buffer.groups:
        expected = reader.image(as_png(picture(group.group_id)), "image")
        np.testing.assert_array_equal(group.image_columns["pixels"], expected.pixels)
        assert group.token_columns["image_rows"][: len(ids)].tolist() == [-1, -1, -1, -1, 0, 1, -1, -1, -1]
    assert sorted(entry.group_id for entry in answered) == [0, 1]
