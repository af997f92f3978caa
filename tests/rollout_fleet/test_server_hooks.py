"""What is changed in an SGLang server of ours, without a server."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout_fleet.engines.server_hooks import PAUSED, PLUGIN, register, rest_while_paused, write_plugin


def test_sglang_finds_the_hooks_on_the_import_path_of_the_server_alone(tmp_path, monkeypatch):
    write_plugin(tmp_path / "plugins")
    assert not [entry for entry in importlib.metadata.entry_points(group="sglang.srt.plugins") if entry.name == PLUGIN]
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))
    (found,) = (entry for entry in importlib.metadata.entry_points(group="sglang.srt.plugins") if entry.name == PLUGIN)
    assert found.load() is register
    assert found.dist.name


def test_a_scheduler_that_stands_still_sleeps_where_it_has_a_socket():
    naps = []
    rest_while_paused(None, SimpleNamespace(idle_sleeper=SimpleNamespace(maybe_sleep=lambda: naps.append(1))))
    rest_while_paused(None, SimpleNamespace(idle_sleeper=None))
    assert naps == [1]


def test_the_installed_sglang_calls_what_is_hooked_in_each_turn_of_a_paused_loop():
    package = importlib.util.find_spec("sglang")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("sglang is not installed")
    module, _, method = PAUSED.partition(".Scheduler.")
    path = Path(package.submodule_search_locations[0]).parent.joinpath(*module.split(".")).with_suffix(".py")
    loops = re.findall(rf"if self\._engine_paused:\n\s+self\.{method}\(\)\n\s+continue", path.read_text())
    assert len(loops) == 2, "the scheduler's plain loop, and the one that overlaps"
