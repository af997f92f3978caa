"""Helpers for tests of the ledger: a ledger with one method per command, and summaries of groups."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from asyncrl.core.types import GroupSummary, Plan
from buffer import commands
from buffer.journal import Decided
from buffer.ledger import Ledger
from buffer.rule import StalenessRule


def summary_of(
    lease: commands.GrantedLease,
    *,
    lengths: tuple[int, ...] = (5,),
    rewards: tuple[float, ...] = (0.0, 1.0),
    oldest: int | None = None,
    newest: int | None = None,
) -> GroupSummary:
    """Return the summary that a worker reports for a leased group. By default, all tokens have the lease's version."""
    version = lease.engine_version if oldest is None else oldest
    return GroupSummary(
        group_id=lease.group_id,
        attempt=lease.attempt,
        num_prompt_tokens=3,
        response_lengths=lengths,
        num_tokens=sum(lengths),
        oldest_version=version,
        newest_version=version if newest is None else newest,
        rewards=rewards,
    )


class DrivenLedger(Ledger):
    """A `Ledger` with one method per command."""

    def enqueue(self, group_ids: Iterable[int]) -> list[int]:
        return list(self.apply(commands.Enqueue(group_ids=tuple(group_ids))).group_ids)

    def lease(
        self, engine_version: int, max_groups: int, *, owner: bytes = b"", now: float = 0.0
    ) -> list[commands.GrantedLease]:
        command = commands.LeaseGroups(engine_version=engine_version, max_groups=max_groups)
        return list(self.apply(command, now, sender=owner).leases)

    def renew(self, group_id: int, attempt: int, *, now: float) -> bool:
        return not self.apply(commands.Renew(((group_id, attempt),)), now).lost

    def reserve(self, lease: commands.GrantedLease, num_bytes: int, *, host: str = "") -> commands.Reserved:
        return self.apply(
            commands.Reserve(group_id=lease.group_id, attempt=lease.attempt, num_bytes=num_bytes, host=host)
        )

    def add_store(self, host: str) -> int:
        return self.apply(commands.AddStore(address=f"tcp://{host}:{len(self.groups.space.stores)}", host=host)).store

    def drop_store(self, store: int) -> commands.DroppedStore:
        return self.apply(commands.DropStore(store=store))

    def save(
        self, lease: commands.GrantedLease, progress: commands.Progress, *, continued: bool = True, num_bytes: int = 0
    ) -> None:
        self.apply(
            commands.SavePrefix(
                group_id=lease.group_id,
                attempt=lease.attempt,
                progress=progress,
                continued=continued,
                num_bytes=num_bytes,
            )
        )

    def put(
        self, summary: GroupSummary, *, continued: bool = True, num_bytes: int = 0, num_left_out: int = 0
    ) -> commands.PutResult:
        command = commands.Put(summary=summary, continued=continued, num_bytes=num_bytes, num_left_out=num_left_out)
        return self.apply(command).result

    def release(
        self,
        group_id: int,
        attempt: int,
        *,
        num_tokens: int,
        reason: str = "aborted",
        continued: bool = True,
        max_failures: int = 0,
    ) -> bool:
        command = commands.Release(
            group_id=group_id,
            attempt=attempt,
            num_tokens=num_tokens,
            reason=reason,
            continued=continued,
            max_failures=max_failures,
        )
        return self.apply(command).is_dropped

    def expire(self, now: float) -> int:
        return len(self.apply(commands.Expire(), now).group_ids)

    def take_back(self, owner: bytes) -> int:
        return len(self.apply(commands.TakeBack(owner=owner)).group_ids)

    def lose(self, group_ids: Iterable[int]) -> tuple[int, ...]:
        return self.apply(commands.LoseGroups(group_ids=tuple(group_ids))).dissolved

    def plan(self, version: int) -> Plan | None:
        return self.batch(version) if self.apply(commands.PlanBatch(version=version)).group_ids else None

    def commit(self, version: int) -> list[int]:
        return list(self.apply(commands.Commit(version=version)).group_ids)

    def checkpoint(self, version: int, *, key: str = "saved") -> bool:
        """Record a checkpoint of a version. Returns False if the ledger had recorded this checkpoint already."""
        return self.apply(commands.Checkpoint(folder="/unused/v00000001", version=version, key=key)).is_new

    def rewind(self, version: int) -> commands.Rewound:
        return self.apply(commands.Rewind(version=version, incarnation=self.incarnation + 1))

    def resume(self, version: int, *, tokens_generated: int = 0, key: str = "saved") -> commands.Rewound:
        return self.apply(commands.Resume(version=version, key=key, tokens_generated=tokens_generated))

    def step(self) -> list[int]:
        """Plan and commit the next batch. Returns the group ids."""
        version = self.learner_version
        plan = self.plan(version)
        assert plan is not None
        assert self.commit(version) == [group.group_id for group in plan.groups]
        return [group.group_id for group in plan.groups]


class RecordedCommands:
    """Replaces a journal. Keeps the encoded commands since the last snapshot."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []

    def record(self, command: Any, outcome: Any, frames: Any) -> None:
        self.rows.append(msgspec.msgpack.encode(Decided(decided=((command, outcome),))))

    def read(self) -> Iterator[tuple[Any, Any]]:
        for row in self.rows:
            yield from msgspec.msgpack.decode(row, type=Decided).decided


def ledger(max_lag: int, groups_per_step: int, **options: Any) -> DrivenLedger:
    """Return a ledger with a hundred prompts queued."""
    new = DrivenLedger(StalenessRule(max_lag=max_lag, groups_per_step=groups_per_step), **options)
    new.enqueue(range(100))
    return new
