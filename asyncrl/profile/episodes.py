"""Computes what the report shows of an agent's episode: one row per message and per tool call, and all waits.

Times are seconds since the episode began.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

Values = dict[str, Any]

WAITS = ("generation", "queue", "tool", "environment")
"""What an episode waits for. If it waits for several at the same time, the first one in this order counts."""
MAX_LETTERS = 4000
"""Largest number of characters of a turn's text. The report omits the middle of a longer text."""
MAX_ROWS = 2000
"""Largest number of rows of an episode. The report omits later rows."""
_DIGITS = 3


def episode_view(sample: Mapping[str, Any], episode: Mapping[str, Any]) -> Values:
    """Return what the report shows of one episode of an agent.

    Args:
        sample: The row of the episode in ``samples/``.
        episode: The value of the row's column ``episode``.

    Returns:
        A mapping with these keys:

        - ``title``, ``failure`` and ``duration_s``;
        - ``rows``: one dict per turn (a message of the dialogue) and per tool call, at most `MAX_ROWS`;
        - ``num_left_out``: number of rows that are left out;
        - ``waits``: what the episode waited for (one of `WAITS`), as consecutive periods [what, start, end] in seconds
          from the start of the episode to its end;
        - ``waits_s``: total seconds of these periods, by what the episode waited for.
    """
    turns = [turn for turn in episode["turns"] if turn["is_sampled"]]
    rows = [*_rows(episode)]
    waits = [*_waits(episode)]
    seconds: dict[str, float] = defaultdict(float)
    for what, start, end in waits:
        seconds[what] += end - start
    facts = (
        f"group {sample['group_id']}",
        f"reward {sample['reward']:.3f}",
        f"{len(turns)} turn{'' if len(turns) == 1 else 's'}",
        f"{sample['num_tokens']} tokens",
        f"{episode['duration_s']:.3g} s",
    )
    return {
        "title": ", ".join(facts),
        "failure": episode["failure"],
        "duration_s": _rounded(episode["duration_s"]),
        "rows": rows[:MAX_ROWS],
        "num_left_out": max(0, len(rows) - MAX_ROWS),
        "waits": [[what, _rounded(start), _rounded(end)] for what, start, end in waits],
        "waits_s": {what: _rounded(seconds[what]) for what in WAITS},
    }


def _rows(episode: Mapping[str, Any]) -> Iterator[Values]:
    """Yield the rows of an episode, branch by branch. At a fork, the shorter branches come first and are indented.

    A row has ``name``, ``indent``, ``num_tokens``, ``reward``, ``finish_reason`` and these keys:

    - ``kind``: ``prompt``, ``given``, ``sampled`` or ``tool``;
    - ``note``: why a branch begins here;
    - ``pieces``: the text in parts, each [policy version, text];
    - ``bars``: the waits of the row, [reason, start, end].

    The row of a tool follows the last turn that ended before the tool began.
    """
    turns = {turn["turn"]: turn for turn in episode["turns"]}
    children: dict[int, list[int]] = defaultdict(list)
    for index, turn in turns.items():
        children[turn["parent"]].append(index)
    size = {-1: 0}
    for index in sorted(turns, reverse=True):  # visit children first; they have higher indices than their parents
        size[index] = 1 + sum(size[child] for child in children[index])
    tools = _tools_by_turn(episode)
    roots = children[-1]
    stack = [(root, 0, "new root" if place else "") for place, root in reversed([*enumerate(roots)])]
    while stack:
        index, indent, note = stack.pop()
        yield _turn_row(turns[index], indent, note)
        for tool in tools.get(index, ()):
            end = episode["duration_s"] if tool["ended_s"] is None else tool["ended_s"]
            bars = [["tool", _rounded(tool["began_s"]), _rounded(end)]]
            yield _turn_row({**_NOTHING, "turn": tool["name"]}, indent, "") | {"kind": "tool", "bars": bars}
        by_size = sorted(children[index], key=lambda child: (size[child], child))
        others, longest = by_size[:-1], by_size[-1:]
        stack += [(child, indent, f"continues turn {index}" if others else "") for child in longest]
        stack += [(child, indent + 1, f"branch of turn {index}") for child in reversed(others)]


def _turn_row(turn: Mapping[str, Any], indent: int, note: str) -> Values:
    kind = "sampled" if turn["is_sampled"] else "prompt" if turn["turn"] == 0 else "given"
    return {
        "kind": kind,
        "name": f"{turn['turn']}",
        "indent": indent,
        "note": note,
        "pieces": _shortened(turn["pieces"]),
        "num_tokens": turn["num_tokens"],
        "reward": turn["reward"],
        "finish_reason": turn["finish_reason"],
        "bars": [[what, _rounded(start), _rounded(end)] for what, start, end in _bars(turn)],
    }


_NOTHING = {
    **{"is_sampled": False, "pieces": (), "num_tokens": None, "reward": None, "finish_reason": ""},
    **{"asked_s": None, "first_token_s": None, "ended_s": None},
}


def _bars(turn: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield the waits of one turn of an episode, in order of time, as triples (reason, start, end)."""
    asked, ended = turn["asked_s"], turn["ended_s"]
    if asked is None or ended is None or ended <= asked:
        return
    first = ended if turn["first_token_s"] is None else turn["first_token_s"]
    if first > asked:
        yield "queue", asked, first
    if ended > first:
        yield "generation", first, ended


def _waits(episode: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield the waits of an episode, from its start to its end, as consecutive triples (reason, start, end)."""
    duration = episode["duration_s"]
    found = [bar for turn in episode["turns"] for bar in _bars(turn)]
    found += [
        ("tool", tool["began_s"], duration if tool["ended_s"] is None else tool["ended_s"]) for tool in episode["tools"]
    ]
    changes: dict[float, Counter[str]] = defaultdict(Counter, {0.0: Counter(), duration: Counter()})
    for what, start, end in found:
        changes[min(start, duration)][what] += 1
        changes[min(end, duration)][what] -= 1
    running: Counter[str] = Counter()
    before: tuple[str, float, float] | None = None
    for start, end in pairwise(sorted(changes)):
        running.update(changes[start])
        what = next((what for what in WAITS if running[what] > 0), WAITS[-1])
        if before is not None and before[0] == what:
            before = what, before[1], end
            continue
        if before is not None:
            yield before
        before = what, start, end
    if before is not None:
        yield before


def _tools_by_turn(episode: Mapping[str, Any]) -> dict[int, list[Mapping[str, Any]]]:
    ends = sorted((turn["ended_s"], turn["turn"]) for turn in episode["turns"] if turn["ended_s"] is not None)
    found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    place, last = 0, 0
    for tool in sorted(episode["tools"], key=lambda tool: tool["began_s"]):
        while place < len(ends) and ends[place][0] <= tool["began_s"]:
            last, place = ends[place][1], place + 1
        found[last].append(tool)
    return found


def _shortened(pieces: Sequence[Sequence[Any]]) -> list[list[Any]]:
    if sum(len(text) for _, text in pieces) <= MAX_LETTERS:
        return [[version, text] for version, text in pieces]
    head, tail, left = [], [], MAX_LETTERS // 2
    for version, text in pieces:
        head.append([version, text[:left]])
        left -= len(head[-1][1])
        if left <= 0:
            break
    left = MAX_LETTERS // 2
    for version, text in reversed(pieces):
        tail.append([version, text[-left:]])
        left -= len(tail[-1][1])
        if left <= 0:
            break
    return [*head, [-1, "\n… the middle is left out …\n"], *reversed(tail)]


def _rounded(seconds: float) -> float:
    return round(seconds, _DIGITS)
