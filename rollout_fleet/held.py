"""A lease that a rollout worker holds, and how far its prompt group is."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.protocol.types import Lease

from .types import SampleOutput


@dataclass(eq=False, kw_only=True)
class Held:
    """A lease this worker holds, and the tokens it has to account for.

    Attributes:
        lease: The lease.
        prefixes: What is written of each sample already; empty before the first token.
        num_inherited: Tokens that an earlier attempt wrote.
        num_tokens: Tokens of the group that are known, with the inherited ones.
        revoked: The buffer took the lease away.
        running: The engine has it.
        cut: It is to be cut off, saved and continued.
    """

    lease: Lease
    prefixes: tuple[SampleOutput, ...] = ()
    num_inherited: int = 0
    num_tokens: int = 0
    revoked: bool = False
    running: bool = False
    cut: bool = False

    @property
    def rid(self) -> str:
        """The id of its request."""
        return request_id(self.lease.prompt.group_id, self.lease.attempt)

    @property
    def num_own(self) -> int:
        """Tokens that this worker wrote."""
        return self.num_tokens - self.num_inherited


def request_id(group_id: int, attempt: int) -> str:
    """Return an id of fixed width, since SGLang's scheduler matches ids by prefix."""
    return f"{group_id:012d}-{attempt:03d}"
