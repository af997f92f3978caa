"""Fetches from the client's side: which store server is asked for what, and what their replies hold together."""

from collections.abc import Sequence

from asyncrl.protocol.errors import WireError
from asyncrl.protocol.trajectory import TrajectoryGroup

from .messages import Message, integers
from .payloads import group_of


def split_by_store(group_ids: Sequence[int], attempts: Sequence[int], num_stores: int) -> list[dict[str, list[int]]]:
    """The fields of the fetch that each store server is asked for."""
    asked: list[dict[str, list[int]]] = [{"groups": [], "attempts": []} for _ in range(num_stores)]
    for group_id, attempt in zip(group_ids, attempts, strict=True):
        asked[group_id % num_stores]["groups"].append(group_id)
        asked[group_id % num_stores]["attempts"].append(attempt)
    return asked


def join_from_stores(replies: Sequence[Message], group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    """The groups in the replies of all store servers, in the order asked for.

    Raises:
        WireError: they are not the groups asked for.
    """
    streams = [iter(_groups_in(reply)) for reply in replies]
    groups = [next(streams[group_id % len(streams)], None) for group_id in group_ids]
    return _checked([group for group in groups if group is not None], group_ids)


def groups_of(reply: Message, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    """The groups in the reply to a fetch.

    Raises:
        WireError: they are not the groups asked for.
    """
    return _checked(_groups_in(reply), group_ids)


def _groups_in(reply: Message) -> list[TrajectoryGroup]:
    frames = iter(reply.payload)
    counts = integers(reply.fields, "counts")
    if sum(counts) != len(reply.payload):
        raise WireError(f"a fetch says that it has {sum(counts)} frames, and has {len(reply.payload)}")
    return [group_of([next(frames) for _ in range(number)]) for number in counts]


def _checked(groups: list[TrajectoryGroup], group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    if (got := [group.group_id for group in groups]) != list(group_ids):
        raise WireError(f"fetched groups {got[:5]}… instead of {list(group_ids)[:5]}…")
    return groups
