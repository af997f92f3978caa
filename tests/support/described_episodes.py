"""Makes descriptions of episodes in the format that `EpisodeRun.described` writes into a run's samples."""

from typing import Any


def turn(index, parent, text, *, at=None, reward=None, finish_reason="stop", version=11) -> dict[str, Any]:
    """Return a turn. Two policy versions have sampled the turn if ``at`` is given. Otherwise it was not sampled.

    ``at`` contains three times in seconds: of the request for the turn, of its first token, and of its end.
    """
    half = len(text) // 2
    pieces = [[version - 1, text[:half]], [version, text[half:]]] if at else [[-1, text]]
    asked, first, ended = at or (None, None, None)
    return {
        "turn": index, "parent": parent, "is_sampled": at is not None, "num_tokens": len(text), "pieces": pieces,
        "reward": reward, "finish_reason": finish_reason if at else "", "asked_s": asked, "first_token_s": first,
        "ended_s": ended,
    }  # fmt: skip


def forest() -> dict[str, Any]:
    """Return an episode with two parallel tools, a branch that ends, a new root, and texts that contain HTML."""
    turns = [
        turn(0, -1, "<|user|>When was the tower built? <script>alert(1)</script>"),
        turn(1, 0, '<tool_call>{"name": "search"}</tool_call>' * 2, at=(0.2, 0.5, 1.5), reward=0.25),
        turn(2, 1, "a.txt: <b>The tower</b> was built in 1889.\nb.txt: The bridge was built in 1932."),
        turn(3, 2, "It was the bridge.", at=(3.1, 3.2, 3.9), reward=-1.0, finish_reason="length"),
        turn(4, 2, "Let me read more of it. " * 9, at=(4.2, 4.3, 5.6)),
        turn(5, 4, "<|user|>Your memory is full. Write down what you know."),
        turn(6, 5, "the tower: 1889", at=(5.8, 6.4, 7.0), reward=0.5),
        turn(7, -1, "<|user|>You found out before: the tower: 1889"),
        turn(8, 7, "It was built in 1889.", at=(7.4, 7.5, 8.0), reward=1.0),
    ]
    tools = [
        {"name": "search", "began_s": 1.5, "ended_s": 2.7},
        {"name": "read <a.txt>", "began_s": 1.5, "ended_s": 3.0},
    ]
    return {"failure": "", "duration_s": 8.2, "turns": turns, "tools": tools}


def long_episode(num_turns: int = 400) -> dict[str, Any]:
    """Return an episode of many turns. A tool is called after each sampled turn. The last tool call does not end."""
    turns, tools = [turn(0, -1, "<|user|>Guess my number.")], []
    for number in range(num_turns):
        begin = 2.0 * number
        at, end = (begin, begin + 0.1, begin + 1.0), None if number == num_turns - 1 else begin + 1.8
        turns.append(turn(len(turns), len(turns) - 1, f"Is it {number}?", at=at, reward=0.0))
        turns.append(turn(len(turns), len(turns) - 1, "Higher."))
        tools.append({"name": "compare", "began_s": begin + 1.0, "ended_s": end})
    return {"failure": "tool compare did not answer", "duration_s": 2.0 * num_turns, "turns": turns, "tools": tools}
