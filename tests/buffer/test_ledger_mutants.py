"""Mutation tests: if one comparison in the code of the ledger is changed, a test must fail."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="mutants need the dev extra: pip install asyncrl[dev]")

import parso
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).parents[2]
MODULES = {"rule": "", "ledger": "", "account": "Attempts", "checkpoints": ""}
"""The modules that are changed. In a module with the name of a class, only this class is changed."""
CHANGES = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_GtE", "LtE_Gt", "Gt_LtE", "GtE_Lt", "Eq_NotEq", "NotEq_Eq")

EQUIVALENT = {
    ("rule", "take", "Lt_LtE"): "it only sets `_last` to its own value",
}
"""Mutants that change nothing: module, function, change."""

RUN = """
import importlib.abc, importlib.util, pathlib, sys
name, path, machine, *unit_tests = sys.argv[1:]

class Mutant(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def find_spec(self, fullname, paths, target=None):
        return importlib.util.spec_from_loader(fullname, self) if fullname == name else None
    def get_source(self, fullname):
        return pathlib.Path(path).read_text()

sys.meta_path.insert(0, Mutant())
import pytest
from hypothesis import HealthCheck, Phase, settings
settings.register_profile("any machine", deadline=None)  # slowness must not count as a failure
settings.load_profile("any machine")
without_long_ones = ["-k", "not does_not_grow and not a_users"]
if pytest.main(["-x", "-q", "--noconftest", "-p", "no:cacheprovider", *without_long_ones, *unit_tests]):
    sys.exit(1)

from hypothesis.stateful import run_state_machine_as_test
spec = importlib.util.spec_from_file_location("machine", machine)
module = importlib.util.module_from_spec(spec)
sys.modules["machine"] = module
spec.loader.exec_module(module)
search = settings(
    max_examples=1500, stateful_step_count=60, deadline=None, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
try:
    run_state_machine_as_test(module.LedgerMachine, settings=search)
except BaseException as error:
    sys.exit(1)
"""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One mutant of a module. ``number`` is the index of the comparison among those with the operator to change."""

    module: str
    change: str
    number: int
    function: str

    def source(self) -> str:
        """Return the source code of the mutated module."""
        code = (ROOT / "buffer" / f"{self.module}.py").read_text()
        operator = get_operator(f"core/ReplaceComparisonOperator_{self.change}")()
        return mutate_code(code, operator, self.number)


def comparisons() -> list[Comparison]:
    """Return every mutant of the modules, except mutants that change nothing."""
    return [mutant for module in MODULES for mutant in comparisons_of(module)]


def comparisons_of(module: str) -> Iterator[Comparison]:
    tree = parso.parse((ROOT / "buffer" / f"{module}.py").read_text())
    nodes = list(nodes_of(tree))
    for change in CHANGES:
        operator = get_operator(f"core/ReplaceComparisonOperator_{change}")()
        places = [node for node in nodes for _ in operator.mutation_positions(node)]
        for number, node in enumerate(places):
            owner, scope = (parso.python.tree.search_ancestor(node, kind) for kind in ("classdef", "funcdef"))
            function = "" if scope is None else scope.name.value
            is_meant = not MODULES[module] or (owner is not None and owner.name.value == MODULES[module])
            if is_meant and (module, function, change) not in EQUIVALENT:
                yield Comparison(module=module, change=change, number=number, function=function)


def nodes_of(node: parso.tree.NodeOrLeaf) -> Iterator[parso.tree.NodeOrLeaf]:
    yield node
    for child in getattr(node, "children", ()):
        yield from nodes_of(child)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", comparisons(), ids=lambda m: f"{m.module}-{m.function}-{m.change}-{m.number}")
def test_a_test_fails_for_each_changed_comparison(mutant: Comparison, tmp_path: Path):
    path = tmp_path / f"{mutant.module}.py"
    path.write_text(mutant.source())
    names = (
        "test_ledger_machine.py",
        "test_ledger.py",
        "test_selection.py",
        "test_room.py",
        "test_worker_deaths.py",
        "test_rewind.py",
        "test_uses.py",
    )
    tests = [str(ROOT / "tests" / "buffer" / name) for name in names]
    done = subprocess.run(
        [sys.executable, "-c", RUN, f"buffer.{mutant.module}", str(path), *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, f"no test failed for {mutant}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
