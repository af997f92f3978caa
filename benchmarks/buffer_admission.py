"""Compares the buffer's admission rule for new groups with a former rule.

Before a worker dies, the worker saves the tokens of its unfinished groups. Some saved tokens become too old for
training. The benchmark measures the share of the other saved tokens. It simulates a saturated system on the ledger (the
states of all groups), without sockets or clocks. Workers run every group that the rule admits. From time to time, a
worker dies. The learner takes each batch as soon as the batch is ready.

Run as ``python -m benchmarks.buffer_admission``; `benchmarks.buffer` includes the same figures.
"""

import argparse
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.core.types import GroupSummary
from buffer import BufferConfig, Ledger, StalenessRule
from buffer.commands import Commit, Enqueue, GrantedLease, LeaseGroups, PlanBatch, Progress, Put, SavePrefix, TakeBack

_NUM_WORKERS = 4
_TOKENS_PER_TICK = 50
_DEATHS_PER_TICK = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class FormerRule(StalenessRule):
    """The former admission rule. This rule counts all open (leased or stored) groups.

    Unlike the present rule, the former rule also counts the open groups with a later deadline than the new group.
    """

    def admits(self, open_by_deadline: Mapping[int, int], *, version: int, engine_version: int) -> bool:
        """Return whether a worker may begin one more group.

        ``open_by_deadline`` maps a deadline to a number of open groups. The deadline is the latest learner step that
        may train these groups. ``version`` is the learner's version, and ``engine_version`` is the version that would
        generate the group.
        """
        num_open = sum(open_by_deadline.values())
        return num_open + (version - engine_version) * self.groups_per_step < (self.max_lag + 1) * self.groups_per_step


@dataclass(kw_only=True)
class _Rollout:
    """A running group: its lease, its current number of tokens, and its final number of tokens."""

    lease: GrantedLease
    num_tokens: int
    length: int


class SaturatedRun:
    """A simulation of workers and a learner that share a ledger.

    Args:
        rule: The rule that decides which groups are admitted.
        seed: Seed of the lengths and deaths.
        max_deaths: The ledger drops a group after this many of the group's workers have died. 0: never.
    """

    def __init__(self, rule: StalenessRule, *, seed: int, max_deaths: int = 0) -> None:
        self.ledger = Ledger(rule, order="earliest_deadline", max_deaths=max_deaths)
        self.num_saved_tokens = 0
        self._random = random.Random(seed)
        self._next_id = 0
        self._running: dict[int, _Rollout] = {}
        self._lengths: dict[int, int] = {}

    def tick(self) -> None:
        """Simulate one unit of time.

        Every running group gets more tokens, and finished groups are stored. A worker may die. If a batch is ready, the
        learner makes a step. Then workers begin all groups that the rule admits.
        """
        for rollout in list(self._running.values()):
            rollout.num_tokens = min(rollout.num_tokens + _TOKENS_PER_TICK, rollout.length)
            if rollout.num_tokens == rollout.length:
                self._put(rollout)
        if self._random.random() < _DEATHS_PER_TICK:
            self._kill(bytes([self._random.randrange(_NUM_WORKERS)]))
        self._step()
        self._lease()

    def _put(self, rollout: _Rollout) -> None:
        lease = self._running.pop(rollout.lease.group_id).lease
        summary = GroupSummary(
            group_id=lease.group_id,
            attempt=lease.attempt,
            num_prompt_tokens=16,
            response_lengths=(rollout.length,),
            num_tokens=rollout.length,
            oldest_version=lease.engine_version,
            newest_version=lease.engine_version,
            rewards=(1.0,),
        )
        self.ledger.apply(Put(summary=summary))

    def _kill(self, worker: bytes) -> None:
        for group in self.ledger.groups.leases.of_owner(worker):
            rollout = self._running.pop(group.group_id)
            progress = Progress(
                num_tokens=rollout.num_tokens,
                oldest_version=rollout.lease.engine_version,
                newest_version=self.ledger.learner_version,
            )
            self.ledger.apply(SavePrefix(group_id=group.group_id, attempt=group.attempt, progress=progress))
            self.num_saved_tokens += rollout.num_tokens
        self.ledger.apply(TakeBack(owner=worker))

    def _step(self) -> None:
        version = self.ledger.learner_version
        if self.ledger.apply(PlanBatch(version=version)).group_ids:
            self.ledger.apply(Commit(version=version))

    def _lease(self) -> None:
        rule = self.ledger.rule
        if (num_short := 4 * rule.groups_per_step - self.ledger.groups.num_queued) > 0:
            self.ledger.apply(Enqueue(group_ids=tuple(range(self._next_id, self._next_id + num_short))))
            self._next_id += num_short
        worker = 0
        while leases := self.ledger.apply(
            LeaseGroups(engine_version=self.ledger.learner_version, max_groups=1), sender=bytes([worker])
        ).leases:
            [lease] = leases
            length = self._lengths.setdefault(lease.group_id, self._random.randint(100, 2000))
            self._running[lease.group_id] = _Rollout(lease=lease, num_tokens=lease.num_inherited, length=length)
            worker = (worker + 1) % _NUM_WORKERS


def saved_tokens_kept(rule: StalenessRule, *, num_ticks: int = 3000, seed: int = 0, max_deaths: int = 0) -> float:
    """Simulate ``num_ticks`` units of time with an admission rule.

    Dying workers save tokens, and the ledger drops saved tokens that are too old. Return the share (0 to 1) of the
    saved tokens that the ledger does not drop.
    """
    run = SaturatedRun(rule, seed=seed, max_deaths=max_deaths)
    for _ in range(num_ticks):
        run.tick()
    return 1 - run.ledger.account.tokens_dropped["stale_prefix"] / run.num_saved_tokens


def admission_figures(*, num_ticks: int) -> dict[str, float]:
    """Return the share of the saved tokens that each admission rule keeps, by name, with 16 groups per step."""
    figures = {}
    for max_lag in (1, 2):
        exact = saved_tokens_kept(StalenessRule(max_lag=max_lag, groups_per_step=16), num_ticks=num_ticks)
        former = saved_tokens_kept(FormerRule(max_lag=max_lag, groups_per_step=16), num_ticks=num_ticks)
        suffix = "" if max_lag == 2 else f"_lag_{max_lag}"
        rule, max_deaths = StalenessRule(max_lag=max_lag, groups_per_step=16), BufferConfig().max_worker_deaths
        limited = saved_tokens_kept(rule, num_ticks=num_ticks, max_deaths=max_deaths)
        figures |= {f"saved_tokens_kept{suffix}": exact, f"saved_tokens_kept_formerly{suffix}": former}
        figures[f"saved_tokens_kept_with_death_limit{suffix}"] = limited
    return figures


def main() -> None:
    """Compare the present and the former admission rule. Print a table, then the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buffer_admission", description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="simulate 1000 ticks instead of 3000")
    figures = admission_figures(num_ticks=1000 if parser.parse_args().quick else 3000)
    baseline = {name.replace("_formerly", ""): share for name, share in figures.items() if "_formerly" in name}
    figures = {name: share for name, share in figures.items() if "_formerly" not in name}
    for name, share in figures.items():
        former = f"{baseline[name]:6.3f} by the former rule" if name in baseline else ""
        sys.stdout.write(f"{name:40} {share:6.3f}  {former}\n")
    sys.stdout.write(json.dumps({"figures": figures, "baseline": baseline}) + "\n")


if __name__ == "__main__":
    main()
