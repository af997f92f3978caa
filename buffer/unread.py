"""Fetched bytes that a client may not have read yet: what a consumer that stalls can make the server keep."""

from collections import OrderedDict, deque

from asyncrl.protocol.errors import StoreFull

_MAX_CLIENTS = 4096


class Unread:
    """Sizes of the replies to fetches, by client; a fetch says up to which earlier one its client has read.

    Args:
        limit: Most bytes on their way to one client.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._replies: OrderedDict[bytes, deque[tuple[int, int]]] = OrderedDict()

    def add(self, client: bytes, request_id: int, num_bytes: int, *, read: int) -> None:
        """Note a reply before it is sent.

        Args:
            client: Who asked.
            request_id: Of this fetch.
            num_bytes: Size of the reply.
            read: Largest request id of a fetch whose reply the client has read.

        Raises:
            StoreFull: it is more than may be on its way beside what the client has not read.
        """
        replies = self._replies.setdefault(client, deque())
        self._replies.move_to_end(client)
        while replies and (replies[0][0] <= read or replies[0][0] == request_id):
            replies.popleft()
        waiting = sum(size for _, size in replies)
        if replies and waiting + num_bytes > self._limit:
            raise StoreFull(
                f"{waiting} fetched bytes are on their way to this client unread, {num_bytes} more are over "
                f"buffer.max_stored_bytes={self._limit}; read them first"
            )
        replies.append((request_id, num_bytes))
        if len(self._replies) > _MAX_CLIENTS:
            self._replies.popitem(last=False)
