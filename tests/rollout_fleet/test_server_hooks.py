"""The changes that asyncrl's servers make to SGLang's code, tested without a server."""

import importlib.metadata
import importlib.util
import multiprocessing
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_fleet.engines import server_hooks
from rollout_fleet.engines.server_hooks import (
    PAUSED,
    PLUGIN,
    PREPARED,
    RETRACTED,
    arrangement_of_experts,
    fork_on_cpu,
    register,
    rest_while_paused,
    skip_known_logprobs,
    write_plugin,
)


def test_only_the_import_path_of_a_server_contains_the_sglang_hooks(tmp_path, monkeypatch):
    write_plugin(tmp_path / "plugins")
    assert not [entry for entry in importlib.metadata.entry_points(group="sglang.srt.plugins") if entry.name == PLUGIN]
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))
    (found,) = (entry for entry in importlib.metadata.entry_points(group="sglang.srt.plugins") if entry.name == PLUGIN)
    assert found.load() is register
    assert found.dist is not None, "SGLang reads the name of the distribution"


@pytest.mark.parametrize(
    ("on_cpu", "num_threads", "expected"), [("1", 1, ["fork"]), ("1", 2, []), ("0", 1, []), ("", 1, [])]
)
def test_a_server_forks_its_processes_only_on_a_cpu_and_without_threads(monkeypatch, on_cpu, num_threads, expected):
    chosen = []
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", on_cpu)
    monkeypatch.setattr(server_hooks.os, "listdir", lambda path: [str(n) for n in range(num_threads)])
    monkeypatch.setattr(multiprocessing, "set_start_method", lambda method, force: chosen.append(method))
    fork_on_cpu(None, "server_args")
    assert chosen == expected


def test_a_paused_scheduler_sleeps_if_it_has_an_idle_sleeper():
    naps = []
    rest_while_paused(None, SimpleNamespace(idle_sleeper=SimpleNamespace(maybe_sleep=lambda: naps.append(1))))
    rest_while_paused(None, SimpleNamespace(idle_sleeper=None))
    assert naps == [1]


def test_the_arrangement_of_experts_changes_when_experts_or_ranks_move(monkeypatch):
    maps = [None]
    module = SimpleNamespace(get_global_expert_location_metadata=lambda: maps[-1])
    monkeypatch.setitem(sys.modules, "sglang.srt.eplb.expert_location", module)
    layers = [SimpleNamespace(), SimpleNamespace(_expert_storage_rank=0, moe_ep_rank=0, moe_tp_rank=1)]
    model, seen = SimpleNamespace(modules=lambda: layers), [arrangement_of_experts(SimpleNamespace(modules=list))]
    for places in (None, [[0, 1]], [[1, 0]]):
        maps.append(None if places is None else SimpleNamespace(physical_to_logical_map=np.array(places)))
        seen.append(arrangement_of_experts(model))
        assert seen[-1] == arrangement_of_experts(model)
    layers[1]._expert_storage_rank = 1
    seen.append(arrangement_of_experts(model))
    assert len(set(seen)) == len(seen) == 5
    monkeypatch.setitem(sys.modules, "sglang.srt.eplb.expert_location", None)
    assert arrangement_of_experts(model) is None


def retracted(*, prompt: int, written: int, start: int) -> SimpleNamespace:
    return SimpleNamespace(origin_input_ids=[1] * prompt, output_ids=[2] * written, logprob_start_len=start)


@pytest.mark.parametrize(("start", "expected"), [(5, 12), (9, 12), (0, 0), (4, 4), (-1, -1)])
def test_a_retracted_request_skips_the_log_probs_that_it_already_has(start, expected):
    request = retracted(prompt=5, written=7, start=start)
    skip_known_logprobs(None, request)
    assert request.logprob_start_len == expected


def test_the_installed_sglang_skips_known_log_probs_with_the_hook():
    module, _, method = RETRACTED.partition(".Req.")
    source = source_of(module)
    assert f"    def {method}(self)" in source
    function = re.search(r"^def compute_extend_logprob_start_len\(.*?(?=^def )", source, re.MULTILINE | re.DOTALL)
    assert function, "SGLang no longer has this function"
    names: dict = {}
    exec(function.group(), names)
    request = retracted(prompt=5, written=7, start=5)

    def skipped(prefix: int, chunk: int) -> int:
        return names["compute_extend_logprob_start_len"](
            logprob_start_len=request.logprob_start_len,
            prefix_len=prefix,
            extend_len=chunk,
            full_untruncated_fill_len=12,
        )

    assert skipped(0, 12) == 5, "without the hook, only the prompt is skipped"
    skip_known_logprobs(None, request)
    assert skipped(0, 12) == 12
    assert [skipped(0, 8), skipped(8, 4)] == [8, 4], "known log-probs must also be skipped in chunks"


def source_of(module: str) -> str:
    package = importlib.util.find_spec("sglang")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("sglang is not installed")
    return (
        Path(package.submodule_search_locations[0]).parent.joinpath(*module.split(".")).with_suffix(".py").read_text()
    )


def test_both_loops_of_the_installed_sglang_call_the_hooked_method_while_paused():
    module, _, method = PAUSED.partition(".Scheduler.")
    loops = re.findall(rf"if self\._engine_paused:\n\s+self\.{method}\(\)\n\s+continue", source_of(module))
    assert len(loops) == 2, "the scheduler must have a plain and an overlapping loop"


def test_the_hooked_function_of_the_installed_sglang_sets_the_process_start_method():
    module, _, function = PREPARED.rpartition(".")
    body = source_of(module).partition(f"def {function}(")[2].partition("\ndef ")[0]
    assert "mp.set_start_method(" in body
