"""Agents with random behavior use a session. The trained tokens must always equal the sampled tokens."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_fleet.episodes.config import RendererConfig
from rollout_fleet.episodes.renderer import load_renderer
from tests.support.chat_models import TEMPLATES, save_chat_model
from tests.support.scripted_turns import USER, Talk

TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
STEPS = ("continue", "continue", "continue", "result", "edit", "drop_reasoning", "retry", "twice", "compact", "tools")


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    paths = {style: save_chat_model(folder / style, style) for style in TEMPLATES}
    return {
        (style, keeps): load_renderer(path, RendererConfig(keep_reasoning=keeps))
        for style, path in paths.items()
        for keeps in (False, True)
    }


class Agent:
    """An agent that continues, edits, retries, compacts and branches conversations at random."""

    def __init__(self, renderer, seed):
        self.rng = random.Random(seed)
        self.written = {}
        self.talk = Talk(renderer)
        self.talk.turns.script = self.write
        self.conversations = [[USER]]

    def write(self, prompt_ids, sampling):
        """Return random tokens, some with ``<think>`` or ``<tool_call>`` parts. The final token is often a stop token.

        Decoding and encoding these tokens usually gives different tokens.
        """
        tokenizer, rng = self.talk.renderer.tokenizer, self.rng
        stops = list(sampling.stop_token_ids)
        usual = [token for token in range(len(tokenizer)) if token not in stops]
        ids = [rng.choice(usual) for _ in range(rng.randint(1, 8))]
        if rng.random() < 0.3:
            ids = [*tokenizer.encode("<think>"), *ids, *tokenizer.encode("</think>"), *ids]
        if rng.random() < 0.3:
            ids += tokenizer.encode('<tool_call>{"name": "weather", "arguments": {"city": "R"}}</tool_call>')
        ids += [rng.choice(stops)] if rng.random() < 0.7 else []
        self.written[prompt_ids.tobytes()] = [*self.written.get(prompt_ids.tobytes(), []), ids]
        return ids

    async def step(self, step):
        rng, messages = self.rng, list(self.rng.choice(self.conversations))
        tools, repeats = ([TOOL] if step in ("result", "tools") else []), step in ("twice", "retry")
        if step == "compact":
            messages = [{"role": "system", "content": "Summary."}, {"role": "user", "content": str(rng.random())}]
        elif step == "edit" and len(messages) > 1:
            place = rng.randrange(len(messages))
            messages[place] = {**messages[place], "content": (messages[place]["content"] or "") + "!"}
        elif step == "drop_reasoning":
            messages = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
        if messages[-1]["role"] == "assistant":
            calls = messages[-1].get("tool_calls", [])
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "21"} for call in calls]
            messages += results if results and step != "edit" else [{"role": "user", "content": f"And {step}?"}]
        n = rng.choice([1, 1, 2])
        calls = [self.talk.chat(*messages, tools=tools, n=n)]
        if step == "twice":
            calls.append(self.talk.chat(*messages, tools=tools, n=n))
        outcomes = [*await asyncio.gather(*calls)]
        if step == "retry":
            outcomes.append(await self.talk.chat(*messages, tools=tools, n=n, is_retry=True))
        if repeats:
            assert [answer.turn for answer in outcomes[0]] == [answer.turn for answer in outcomes[1]]
        self.conversations += [[*messages, answer.message] for answer in outcomes[0]]

    def check(self):
        """Check that the trained tokens are the scripted tokens, and that each prompt is the path to its turn."""
        talk, episode = self.talk, self.talk.turns.episode
        talk.check()
        trajectory = episode.trajectory(1.0)
        sampled = [turn.token_ids.tolist() for turn in trajectory.turns if turn.sampled]
        written = [ids for of_prompt in self.written.values() for ids in of_prompt]
        assert sorted(sampled) == sorted(written)
        for prompt, turn in talk.turns.requests:
            assert episode.turn(turn).token_ids.tolist() in self.written[prompt.tobytes()]
            assert np.array_equal(episode.path(episode.turn(turn).parent), prompt)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    style=st.sampled_from(sorted(TEMPLATES)),
    keeps=st.booleans(),
    seed=st.integers(0, 1 << 30),
    steps=st.lists(st.sampled_from(STEPS), min_size=3, max_size=14),
)
def test_a_session_trains_the_sampled_tokens_for_any_agent_behavior(renderers, style, keeps, seed, steps):
    agent = Agent(renderers[style, keeps], seed)

    async def run():
        for step in steps:
            try:
                await agent.step(step)
            except ValueError as error:
                assert "refuses" in str(error), "only a template may refuse messages of an agent"  # noqa: PT017

    asyncio.run(run())
    agent.check()


def test_decoding_and_encoding_the_answers_of_the_agents_usually_changes_their_tokens(renderers):
    renderer = renderers["chatml", False]
    agent = Agent(renderer, 3)
    agent.talk.turns.requests.clear()

    async def run():
        for _ in range(8):
            await agent.step("continue")

    asyncio.run(run())
    written = [ids for of_prompt in agent.written.values() for ids in of_prompt]
    again = [renderer.tokenizer.encode(renderer.tokenizer.decode(ids)) for ids in written]
    assert sum(ids != encoded for ids, encoded in zip(written, again, strict=True)) > len(written) / 2
