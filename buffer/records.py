"""Base classes of the messages between the clients and servers of the buffer.

The messages are operations (requests), answers, and pushes (messages that answer no request). `buffer.commands` and
`buffer.operations` define them.
"""

import re
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from msgspec import Meta, Struct

MAX_COUNT = 1 << 40
MAX_LEASES = 4096
"""Largest number of leases in one request. The bound limits the server's work for a request."""
MAX_REASON = 20_000
Int64 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A count in a message. It is at most 2**40, so that sums of counts fit into 63 bits."""
Seconds = Annotated[float, Meta(ge=0, le=1e18)]
Text = Annotated[str, Meta(max_length=200)]
Key = tuple[Int64, Int64]
"""A group id, and the number of an attempt (a worker's try to generate the group)."""
Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_LEASES)]
Result = TypeVar("Result", covariant=True)
Reply = TypeVar("Reply", covariant=True)


class BufferRole(StrEnum):
    """The role of a client of the buffer. Each role has its own encryption key."""

    rollout = "rollout"
    learner = "learner"
    controller = "controller"
    inspector = "inspector"
    ledger = "ledger"


ROLLOUT, LEARNER, CONTROLLER, INSPECTOR, LEDGER = (frozenset({role}) for role in BufferRole)
EVERY_ROLE = frozenset(BufferRole)
"""The values of `Operation.roles`."""


def _wire_name(name: str) -> str:
    """Return the tag that names a record's type in messages and journals. Example: ``plan_batch`` for `PlanBatch`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Row(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A structure that is encoded as an array of its fields."""


class Answer(Row, frozen=True, tag=_wire_name):
    """A message from a server to a client: the answer to an operation, or a `Push`."""


class LedgerOutcome(Answer, frozen=True):
    """The ledger's decision about a command. Some outcomes are also answers to clients.

    Every subclass declares `is_recorded`. The definition of a subclass without `is_recorded` raises `TypeError`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "is_recorded" not in vars(cls):
            raise TypeError(f"the outcome {cls.__name__} must declare the property is_recorded")

    @property
    def is_recorded(self) -> bool:
        """True if the journal must record the command, because a restarted server must apply this outcome."""
        raise NotImplementedError


class Push(Answer, frozen=True):
    """A message that a server sends without a request."""


class Operation(Row, Generic[Reply], frozen=True, tag=_wire_name):
    """A request of a client to a server. ``Reply`` is the type of the answer.

    Attributes:
        roles: Roles that may send the operation; empty if no client may send the operation.
        is_held: Whether the server may let the request wait. After half of the request's deadline, the server answers
            `NothingYet`.
        has_large_answer: Whether the answer may be large. A large answer comes on the bulk connection.
    """

    roles: ClassVar[frozenset[BufferRole]] = frozenset()
    is_held: ClassVar[bool] = False
    has_large_answer: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The name of the operation, for error messages. Example: ``plan_batch``."""
        return str(self.__struct_config__.tag)

    @property
    def num_parts(self) -> int:
        """Number of requests that the rate limit counts for this operation: one per lease, at least 1."""
        return max(1, len(getattr(self, "leases", ())))


class Command(Operation[Reply], Generic[Result, Reply], frozen=True):
    """An operation that the ledger decides. ``Result`` is the type of the ledger's decision, the outcome."""


def leaves(base: type) -> list[Any]:
    """Return all direct and indirect subclasses of ``base`` that have no subclasses."""
    subclasses = base.__subclasses__()
    return [leaf for kind in subclasses for leaf in leaves(kind)] if subclasses else [base]
