"""Small cases of the benchmarks that test predictions, and of the buffer's benchmark."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig, AutoTokenizer

from asyncrl.cli.compose import compose_run
from asyncrl.planner.scenario import EngineModel, Scenario
from asyncrl.planner.simulator import simulate
from benchmarks import scale
from benchmarks.fleet_leases import WARM_UP_STEPS, measure_leases
from benchmarks.overlap import NUM_WARM_UP, WORKS
from benchmarks.plan import CASES, RECORDED, order_of_runs
from benchmarks.publish_log import measure_log
from benchmarks.published_tables import LAGS, fit, lag_scenario, spread_of, verl_scenario


def test_the_simulator_predicts_a_measured_lag():
    row = LAGS[-1]
    assert simulate(lag_scenario(row)).lag_mean == pytest.approx(row.lag, abs=0.35)


def test_the_spread_of_lengths_follows_from_the_measured_straggling():
    assert spread_of(1.42) == pytest.approx(0.28, abs=0.03)


def test_the_staleness_threshold_of_verl_allows_as_many_prompts_as_max_lag():
    """In verl with the staleness threshold s, (1 + s) x 512 prompts can begin per version.

    In asyncrl, (max_lag + 1) x groups_per_step prompts can begin per version.
    """
    mapped = verl_scenario(0.5, token_s=0.01, spread=0.5)
    assert (mapped.max_lag + 1) * mapped.groups_per_step == 1.5 * 512


def test_a_fit_selects_the_candidate_with_the_smallest_maximum_error():
    candidates = [{"slope": 1.0}, {"slope": 2.0}, {"slope": 3.0}]
    assert fit(candidates, lambda x, candidate: candidate["slope"] * x, {1.0: 2.0, 2.0: 4.2}) == {"slope": 2.0}


def test_a_case_changes_only_its_own_options_of_the_recorded_scenario():
    recorded = Scenario(engine=EngineModel(step_s=0.03))
    assert CASES[-1].scenario(recorded) == replace(recorded, max_lag=2, num_engines=2, num_steps=150)


def test_the_order_of_runs_differs_between_repetitions():
    """The speed of a run depends on the run before it. So the order of the runs must differ between repetitions."""
    runs = (RECORDED, *CASES)
    rounds = [order_of_runs(number) for number in range(9)]
    assert all(sorted(map(runs.index, order)) == list(range(len(runs))) for order in rounds)
    for run in runs:
        assert len({order.index(run) for order in rounds}) >= 3
        assert len({order[order.index(run) - 1] for order in rounds if order[0] != run}) >= 3


def test_the_simulation_of_a_small_system_names_its_first_limit(capsys):
    arguments = "--engines 8 --ranks 2 --batch 8 --steps 6 --weights-gb 1 --engines-per-host 8"
    assert scale.main(arguments.split()) == 0
    page = capsys.readouterr().out
    assert "saturates first    store" in page or "saturates first    publish" in page
    figures = json.loads(page.splitlines()[-1])["figures"]
    assert 0 < figures["ledger_share"] < 0.1


@pytest.mark.parametrize("engine", WORKS)
def test_the_work_of_a_step_fits_the_model_and_fills_the_engine_slots(engine, tmp_path):
    config = compose_run([f"output_dir={tmp_path}", *WORKS[engine].overrides(tmp_path)])
    model, tokenizer = AutoConfig.from_pretrained(config.model.path), AutoTokenizer.from_pretrained(config.model.path)
    longest = config.data.max_prompt_tokens + config.rollout_fleet.sampling.max_new_tokens
    assert longest <= model.max_position_embeddings
    assert len(tokenizer) <= model.vocab_size
    assert config.algorithm.groups_per_step % config.rollout_fleet.groups_in_flight == 0
    assert WORKS[engine].steps >= NUM_WARM_UP + 5
    assert not config.quickstart


@pytest.mark.timeout(60)
def test_each_lease_that_a_commit_admits_is_measured_once():
    waits = measure_leases(4, num_workers=8, num_steps=WARM_UP_STEPS + 2)
    assert len(waits) == 2 * 4
    assert all(0 < wait < 10 for wait in waits)


def test_the_benchmark_measures_the_controller_time_per_publish():
    [(name, cost_ms)] = measure_log(num_engines=5, num_publishes=2).items()
    assert name == "controller_ms_per_publish_5_engines"
    assert 0 < cost_ms < 1000
