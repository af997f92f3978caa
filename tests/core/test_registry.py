"""Names of algorithms: built-in names, names in files, and names in modules."""

from pathlib import Path

import pytest

from asyncrl.core.registry import Registry, absolute_name
from learner.advantages import ADVANTAGES
from learner.losses import LOSSES
from tests.support.registries import undo_registrations

OWN = '''
"""A user's file."""
from json import dumps as written
from learner.losses import LossTerms
from learner.losses import LOSSES

if True:
    def bounded(inputs, config):
        return LossTerms(per_token=-inputs.log_probs)

try:
    first, (second, number) = bounded, (bounded, 3)
except ValueError:
    pass

@LOSSES.register("short_name_{tag}")
def long_name(inputs, config):
    inside = 1
    return LossTerms(per_token=-inputs.log_probs)
'''


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    undo_registrations(monkeypatch, LOSSES)  # importing the file below registers losses
    path = tmp_path / "own_losses.py"
    path.write_text(OWN.replace("{tag}", tmp_path.name))
    return path


@pytest.mark.parametrize("registry", [LOSSES, ADVANTAGES])
def test_every_registered_name_is_found(registry: Registry) -> None:
    for name in registry.names():
        assert callable(registry.get(name))


def test_an_unknown_name_lists_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.advantage must be one of .*'gae', 'grpo'.*got 'grppo'"):
        ADVANTAGES.get("grppo")
    with pytest.raises(ValueError, match="no_such_module"):
        ADVANTAGES.get("no_such_module:f")
    with pytest.raises(ValueError, match=r"learner\.advantages has no 'grppo'"):
        ADVANTAGES.get("learner.advantages:grppo")
    assert ADVANTAGES.get("learner.advantages:grpo") is ADVANTAGES.get("grpo")


@pytest.mark.parametrize("name", ["bounded", "first", "second", "written", "short_name_{tag}", "long_name"])
def test_a_function_of_a_users_file_is_found(own_file: Path, name: str) -> None:
    name = name.replace("{tag}", own_file.parent.name)
    assert callable(LOSSES.get(f"{own_file}:{name}"))
    assert LOSSES.get(f"{own_file}:{name}") is LOSSES.get(f"{own_file}:{name}"), "a file must be imported once"


@pytest.mark.parametrize("name", ["missing", "inside"])
def test_an_unknown_name_in_a_users_file_lists_the_known_names(own_file: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"own_losses\.py has no '{name}', but has .*'bounded'.*'long_name'"):
        LOSSES.get(f"{own_file}:{name}")


def test_a_name_that_is_not_a_function_is_refused(own_file: Path) -> None:
    with pytest.raises(ValueError, match=r"number must name a function, got 3"):
        LOSSES.get(f"{own_file}:number")


def test_the_error_for_a_missing_or_broken_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*absent\.py"):
        LOSSES.get(f"{tmp_path}/absent.py:f")
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(ValueError, match=r"broken\.py, line 2"):
        LOSSES.get(f"{tmp_path}/broken.py:f")
    (tmp_path / "needs.py").write_text("import no_such_package\ndef f(): ...\n")
    with pytest.raises(ValueError, match="No module named 'no_such_package'"):
        LOSSES.get(f"{tmp_path}/needs.py:f")
    (tmp_path / "script.py").write_text("def f(): ...\nraise SystemExit(0)\n")
    with pytest.raises(ValueError, match="cannot be imported: SystemExit"):
        LOSSES.get(f"{tmp_path}/script.py:f")


def test_a_process_that_a_file_spawns_can_import_the_file(tmp_path: Path) -> None:
    (tmp_path / "spawning_agent.py").write_text("""
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

def double(n):
    return 2 * n

def run():
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(double, 21).result()
""")
    assert LOSSES.get(f"{tmp_path}/spawning_agent.py:run")() == 42
    (tmp_path / "json.py").write_text("def f(): ...")
    assert LOSSES.get(f"{tmp_path}/json.py:f").__module__.startswith("json_"), "json is in the standard library"


def test_names_of_files_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_name("own.py:f") == f"{tmp_path}/own.py:f"
    assert absolute_name("package.module:f") == "package.module:f"
    assert absolute_name("ppo_clip") == "ppo_clip"


def test_a_name_is_registered_once() -> None:
    registry: Registry = Registry("algorithm.loss")
    registry.register("mine")(len)
    with pytest.raises(ValueError, match="mine is registered already"):
        registry.register("mine")(len)
    assert registry.get("mine") is len
