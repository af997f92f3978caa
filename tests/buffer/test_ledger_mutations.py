"""Every comparison in admission and feasibility, changed: the state machine must notice each.

The list of mutations is `MUTATIONS`: module, class, the text, and what replaces it. Two changes are no mutants: in
`StalenessRule.required` the last k (all open groups are due by then, and any batch holds enough of them), and a
deadline before w (none exists while the rule holds); both are checked by the tests of the rule itself.
"""

import importlib
import importlib.util
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
    ("staleness", "StalenessRule", "behind * self.groups_per_step", "behind"),
    ("staleness", "StalenessRule", "learner_version - engine_version", "0"),
    ("staleness", "StalenessRule", "engine_version + self.max_lag", "engine_version + self.max_lag + 1"),
    ("staleness", "StalenessRule", "due - k * self", "due - (k + 1) * self"),
    ("staleness", "StalenessRule", "due - k * self.groups_per_step", "due - k * self.groups_per_step - 1"),
    ("staleness", "StalenessRule", "version + k, 0", "version + k - 1, 0"),
    ("staleness", "Window", "if slack <= 0", "if slack < 0"),
    ("staleness", "Window", "if slack <= 0", "if slack <= 1"),
    ("staleness", "Window", "_slack[j] <= 0", "_slack[j] < 0"),
    ("staleness", "Window", "_slack[j] <= 0", "_slack[j] <= 1"),
    ("staleness", "Window", "range(min(k, len", "range(min(k + 1, len"),
    ("staleness", "Window", "range(min(k, len", "range(min(k - 1, len"),
    ("staleness", "Window", "seats - number", "seats"),
    ("ready", "ReadyGroups", "top[1] <= last", "top[1] <= last + 1"),
    ("ready", "ReadyGroups", "deadline - version", "deadline - version + 1"),
    ("ledger", "Ledger", "self.num_stored < self.rule.groups_per_step", "self.num_stored <= self.rule.groups_per_step"),
    ("ledger", "Ledger", "self._on_stale != OnStale.wait or not any(self._missing())", "True"),
    ("staleness", "StalenessRule", "num_ready - num_missing)", "num_ready - num_missing - 1)"),
    ("ledger", "Ledger", "version <= self.learner_version + 1", "version <= self.learner_version + 2"),
    ("ledger", "Ledger", "<= engine_version <= self.learner_version", "<= engine_version <= self.learner_version + 1"),
    (
        "ledger",
        "Ledger",
        "summary.oldest_version < lease.engine_version",
        "summary.oldest_version <= lease.engine_version",
    ),
    ("ledger", "Ledger", "summary.oldest_version < lease.engine_version", "False"),
    ("ledger", "Ledger", "if self.admits(saved.oldest_version)", "if True"),
    ("ledger", "Ledger", "else min(engine_version, progress.oldest_version)", "else engine_version"),
    ("ledger", "Ledger", "lease.expires_at <= now", "lease.expires_at < now - 5"),
]


@contextmanager
def mutated(module_name: str, class_name: str, old: str, new: str) -> Iterator[None]:
    """Give a class the methods that its changed source defines, for a while."""
    module = importlib.import_module(f"buffer.{module_name}")
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    source = spec.loader.get_source(module.__name__)  # type: ignore[union-attr]
    assert old in source, f"{old!r} is no longer in {module.__name__}: mend the list of mutations"
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("module", "kind", "old", "new"), MUTATIONS, ids=lambda value: str(value)[:40])
def test_the_state_machine_notices_a_changed_comparison(module: str, kind: str, old: str, new: str):
    search = settings(
        max_examples=3000,
        stateful_step_count=60,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with mutated(module, kind, old, new), pytest.raises(Exception):  # noqa: B017, PT011 - any failure is a kill
        run_state_machine_as_test(LedgerMachine, settings=search)
