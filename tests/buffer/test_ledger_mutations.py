"""Every comparison in admission and feasibility, changed: the state machine must notice each.

The mutations, each of which a run under ``-m slow`` shows to be caught:

- admission (`StalenessRule.admits`, `Ledger.lease`): ``<`` to ``<=``, a batch too many, one too few, the engine's lag
  ignored, counted in groups, or taken off; an engine ahead of the learner; one group too many or too few for a
  request; a deadline one step late; a prefix admitted at the engine's version, or unasked;
- feasibility (`StalenessRule.required`, `missing`, `Ledger.can_plan`, `Ledger.check_plan`): each index and each
  ``k·B`` off by one, a batch too small, a wait too few, a plan too early;
- the window (`Window`, `ReadyGroups.take_batch`): each bound and each ``<=`` off by one, either way;
- what a put or a save may hold, which attempts are known, when a lease runs out, who is given up for a batch, and
  what a commit takes.

Two changes are no mutants, and not listed: in `StalenessRule.required` the last k (all open groups are due by then, and
any batch holds enough of them), and in `Window.take` ``j < self._last`` to ``<=`` (setting a bound to itself).
"""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_ledger_machine import LedgerMachine

MUTATIONS = [
    ("staleness", "StalenessRule", "< (self.max_lag + 1)", "<= (self.max_lag + 1)"),
    ("staleness", "StalenessRule", "< (self.max_lag + 1)", "< (self.max_lag + 2)"),
    ("staleness", "StalenessRule", "< (self.max_lag + 1)", "< self.max_lag"),
    ("staleness", "StalenessRule", "outstanding + behind", "outstanding - behind"),
    ("staleness", "StalenessRule", "outstanding + behind", "behind"),
    ("staleness", "StalenessRule", "behind * self.groups_per_step", "behind"),
    ("staleness", "StalenessRule", "learner_version - engine_version", "0"),
    ("staleness", "StalenessRule", "engine_version + self.max_lag", "engine_version + self.max_lag + 1"),
    ("staleness", "StalenessRule", "engine_version + self.max_lag", "engine_version + self.max_lag - 1"),
    ("staleness", "StalenessRule", "due - k * self", "due - (k + 1) * self"),
    ("staleness", "StalenessRule", "due - k * self", "due - (k - 1) * self"),
    ("staleness", "StalenessRule", "due - k * self.groups_per_step", "due - k * self.groups_per_step - 1"),
    ("staleness", "StalenessRule", "due - k * self.groups_per_step", "due - k * self.groups_per_step + 1"),
    ("staleness", "StalenessRule", "open_by_deadline.get(version + k, 0)", "open_by_deadline.get(version + k - 1, 0)"),
    ("staleness", "StalenessRule", "open_by_deadline.get(version + k, 0)", "open_by_deadline.get(version + k + 1, 0)"),
    ("staleness", "StalenessRule", "ready_by_deadline.get(version + k, 0)", "ready_by_deadline.get(version, 0)"),
    ("staleness", "StalenessRule", "num_ready - num_missing)", "num_ready - num_missing - 1)"),
    ("staleness", "StalenessRule", "num_ready - num_missing)", "num_ready)"),
    ("staleness", "Window", "if slack <= 0", "if slack < 0"),
    ("staleness", "Window", "if slack <= 0", "if slack <= 1"),
    ("staleness", "Window", "_slack[j] <= 0", "_slack[j] < 0"),
    ("staleness", "Window", "_slack[j] <= 0", "_slack[j] <= 1"),
    ("staleness", "Window", "and j < self._last", "and j > self._last"),
    ("staleness", "Window", "range(min(k, len", "range(min(k + 1, len"),
    ("staleness", "Window", "range(min(k, len", "range(min(k - 1, len"),
    ("staleness", "Window", "seats - number", "seats"),
    ("ready", "ReadyGroups", "top[1] <= last", "top[1] <= last + 1"),
    ("ready", "ReadyGroups", "top[1] <= last", "top[1] < last"),
    ("ready", "ReadyGroups", "deadline - version)", "deadline - version + 1)"),
    ("ready", "ReadyGroups", "deadline - version)", "deadline - version - 1)"),
    ("ready", "ReadyGroups", "len(batch) < seats", "len(batch) < seats - 1"),
    ("ledger", "Ledger", "len(granted) < max_groups", "len(granted) <= max_groups"),
    ("ledger", "Ledger", "len(granted) < max_groups", "len(granted) < max_groups - 1"),
    ("ledger", "Ledger", "and state.admits(engine_version)", "and True"),
    ("ledger", "Ledger", "0 <= engine_version <= learner_version", "0 <= engine_version <= learner_version + 1"),
    ("ledger", "Ledger", "0 <= engine_version <= learner_version", "0 < engine_version <= learner_version"),
    ("ledger", "Ledger", "0 <= engine_version <= learner_version", "0 <= engine_version < learner_version"),
    ("ledger", "Ledger", "or self.state.admits(saved.oldest_version)", "or True"),
    ("ledger", "Ledger", "else min(engine_version, progress.oldest_version)", "else engine_version"),
    (
        "ledger",
        "Ledger",
        "state.num_stored < self.rule.groups_per_step",
        "state.num_stored <= self.rule.groups_per_step",
    ),
    ("ledger", "Ledger", "state.num_stored < self.rule.groups_per_step", "state.num_stored < 1"),
    ("ledger", "Ledger", "self._on_stale != OnStale.wait or not any(self.state.missing())", "True"),
    ("ledger", "Ledger", "self._on_stale != OnStale.wait or", "self._on_stale == OnStale.wait or"),
    ("ledger", "Ledger", "version <= state.learner_version + 1", "version <= state.learner_version + 2"),
    ("ledger", "Ledger", "version <= state.learner_version + 1", "version <= state.learner_version"),
    ("ledger", "Ledger", "is_too_old = summary.oldest_version < lease", "is_too_old = summary.oldest_version <= lease"),
    ("ledger", "Ledger", "is_too_old = summary.oldest_version < lease.engine_version", "is_too_old = False"),
    ("ledger", "Ledger", "if progress.oldest_version < lease", "if progress.oldest_version <= lease"),
    ("ledger", "Ledger", "if progress.oldest_version < lease.engine_version", "if False"),
    ("ledger", "Ledger", "num_tokens >= lease.num_inherited", "num_tokens > lease.num_inherited"),
    ("ledger", "Ledger", "lease.expires_at <= now", "lease.expires_at < now"),
    ("ledger", "Ledger", "lease.expires_at <= now", "lease.expires_at <= now + 5"),
    ("ledger", "Ledger", "0 <= version < state.learner_version", "0 <= version < state.learner_version - 1"),
    ("ledger", "Ledger", "0 <= version < state.learner_version", "0 <= version <= state.learner_version"),
    ("attempts", "Attempts", "attempt < known", "attempt <= known"),
    ("attempts", "Attempts", "attempt < known", "attempt < known - 1"),
    ("leases", "RunningLeases", "if d <= deadline", "if d < deadline"),
    ("leases", "RunningLeases", "len(chosen) == number", "len(chosen) > number"),
    ("batches", "Batches", "lag > self._rule.max_lag", "lag >= self._rule.max_lag"),
    ("batches", "Batches", "version > deadline", "version >= deadline"),
]


@contextmanager
def mutated(module_name: str, class_name: str, old: str, new: str) -> Iterator[None]:
    """Give a class the methods that its changed source defines, for a while."""
    module = importlib.import_module(f"buffer.{module_name}")
    source = inspect.getsource(module)
    namespace = {**vars(module)}
    exec(compile(source.replace(old, new), f"<mutated {module.__name__}>", "exec"), namespace)
    original, changed = getattr(module, class_name), namespace[class_name]
    methods = {name: value for name, value in vars(changed).items() if callable(value) and name in vars(original)}
    kept = {name: vars(original)[name] for name in methods}
    try:
        for name, value in methods.items():
            setattr(original, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(original, name, value)


@pytest.mark.parametrize(("module", "kind", "old", "new"), MUTATIONS, ids=lambda value: str(value)[:50])
def test_each_mutation_changes_something_that_still_compiles(module: str, kind: str, old: str, new: str):
    source = inspect.getsource(getattr(importlib.import_module(f"buffer.{module}"), kind))
    assert source.count(old) == 1, f"{old!r} is not once in {kind}: mend the list of mutations"
    with mutated(module, kind, old, new):
        pass


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("module", "kind", "old", "new"), MUTATIONS, ids=lambda value: str(value)[:50])
def test_the_state_machine_notices_a_changed_comparison(module: str, kind: str, old: str, new: str):
    search = settings(
        max_examples=3000,
        stateful_step_count=60,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with mutated(module, kind, old, new), pytest.raises((Exception, pytest.fail.Exception)):
        run_state_machine_as_test(LedgerMachine, settings=search)
