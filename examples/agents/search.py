"""An agent that searches a folder of texts, with an unmodified ``openai`` client and parallel tool calls.

If the conversation becomes too long, the policy summarizes it. Run this agent with
``rollout_fleet.environment.name=examples/agents/search.py:main`` and
``rollout_fleet.environment.options={folder: texts}``. This module does not import asyncrl.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("search", "Find the files with all of these words. Returns their names and matching lines.", "words"),
    _tool("read", "Read a file.", "file"),
]
SUMMARIZE = "Your memory is full. Write down all that you have found out so far and what you still look for."


class Texts:
    """The text files of a folder, loaded into memory."""

    def __init__(self, folder: str) -> None:
        self.texts = {path.name: path.read_text() for path in sorted(Path(folder).glob("*.txt"))}

    async def call(self, call: Any) -> dict[str, Any]:
        """Run the tool of ``call``, a tool call of the ``openai`` client; return the ``tool`` message.

        If the call is malformed, the message describes the error.
        """
        try:
            arguments = json.loads(call.function.arguments)
            content = self.search(arguments) if call.function.name == "search" else self.texts[arguments["file"]]
        except (ValueError, KeyError, TypeError) as error:
            content = f"error: {error!r}; the files are {sorted(self.texts)}"
        return {"role": "tool", "tool_call_id": call.id, "content": content}

    def search(self, arguments: dict[str, str]) -> str:
        """Search for files that contain all words of ``arguments["words"]``.

        From each such file, return the first three lines with any of the words. Each line begins with the file's name.
        """
        words = arguments["words"].lower().split()
        found = []
        for name, text in self.texts.items():
            if all(word in text.lower() for word in words):
                lines = [line for line in text.splitlines() if any(word in line.lower() for word in words)]
                found += [f"{name}: {line}" for line in lines[:3]]
        return "\n".join(found) or "nothing found"


async def main(
    prompt: Any, base_url: str, api_key: str, *, folder: str, max_chars: int = 8000, max_rounds: int = 16
) -> dict[str, Any]:
    """Play one episode: the policy at ``base_url`` searches the texts of ``folder`` and answers the prompt's question.

    Return the reward, the answer and metrics. The reward is 1 if the answer contains the ground truth, else 0.
    """
    texts, question = await asyncio.to_thread(Texts, folder), [dict(message) for message in prompt.messages]
    messages, num_compactions, answer = list(question), 0, ""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(max_rounds):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = completion.choices[0].message
            answer = message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            messages += await asyncio.gather(*map(texts.call, message.tool_calls))
            if sum(len(str(entry.get("content"))) for entry in messages) > max_chars:
                request = [*messages, {"role": "user", "content": SUMMARIZE}]
                # Pass TOOLS although the policy must not call a tool, so that the start of the prompt stays the same.
                summary = await client.chat.completions.create(
                    model="policy", messages=request, tools=TOOLS, tool_choice="none"
                )
                found = {"role": "user", "content": f"You found out before: {summary.choices[0].message.content}"}
                messages, num_compactions = [*question, found], num_compactions + 1
    reward = float(str(prompt.ground_truth).lower() in answer.lower())
    return {"reward": reward, "answer": answer, "metrics": {"compactions": num_compactions}}
