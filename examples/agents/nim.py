"""Nim: two roles of one policy play against each other. The player who takes the last stone wins.

The players move alternately, and take 1 to 3 stones each time. Each role has its own conversation in the episode. The
turns (sampled messages) of the winner have the reward 1, and the turns of the loser have the reward -1. Choose an
advantage estimator that reads the rewards of turns. Run this environment with
``rollout_fleet.environment.name=examples/agents/nim.py:Nim``.
"""

from __future__ import annotations

import re
from typing import Any

from asyncrl.core.types import Prompt
from rollout_fleet.episodes import Outcome, Policy

RULES = (
    "You play Nim as the {role} player. There are {stones} stones. The players take 1, 2 or 3 stones in turn, and who "
    "takes the last stone wins. Answer with the number of stones that you take."
)


class Nim:
    """An environment with one game per episode. A player who makes an illegal move loses the game."""

    def __init__(self, stones: int = 10) -> None:
        self.stones = stones

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Play one game; return a reward for each turn of both players.

        The number of stones depends on the id of the prompt's group, so all episodes of a group have the same number.
        """
        left = self.stones + prompt.group_id % 4
        conversations: list[list[Any]] = [
            [{"role": "user", "content": RULES.format(role=role, stones=left)}] for role in ("first", "second")
        ]
        moves: list[list[int]] = [[], []]
        player, winner, num_illegal = 0, 0, 0
        while left > 0:
            messages = conversations[player]
            messages.append(message := await policy.chat(messages))
            moves[player].append(message.turn)
            number = re.fullmatch(r"\D*([123])\D*", message.text)
            if number is None or int(number[1]) > left:
                winner, num_illegal = 1 - player, 1
                break
            left -= int(number[1])
            winner, player = player, 1 - player
            said = f"The other player took {number[1]}. {left} stones are left."
            # Before the second player's first turn, the last message has only the rules. Add the first move to it.
            if conversations[player][-1]["role"] == "user":
                said = f"{conversations[player].pop()['content']} {said}"
            conversations[player].append({"role": "user", "content": said})
        return Outcome(
            reward=0.0,
            turn_rewards={turn: 1.0 if role == winner else -1.0 for role in (0, 1) for turn in moves[role]},
            metrics={"first_wins": winner == 0, "illegal_moves": num_illegal, "moves": sum(map(len, moves))},
        )
