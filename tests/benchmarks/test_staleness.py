"""The benchmark of staleness: the exact lag of its runs, and the table of its results."""

import argparse
import json
from dataclasses import replace

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.cli.quickstart import with_quickstart_assets
from benchmarks.lagged import LaggedOutcome, LaggedTraining
from benchmarks.staleness import CORRECTIONS, PUBLISHED, Cell, Results, cells_of, print_tables
from learner.config import Anchor, Weight

CELL = Cell(seed=0, eta=4, correction="tis", mini_batches=4, steps=60, lr=7e-4)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staleness")
    small = [
        "algorithm.groups_per_step=2",
        "algorithm.samples_per_prompt=2",
        "data.eval_max_prompts=4",
        "total_steps=5",
    ]
    return with_quickstart_assets(compose_run([f"output_dir={folder}", *small]))


def test_each_batch_is_sampled_with_weights_that_are_exactly_lag_steps_old(config):
    seen = []

    class Spy(LaggedTraining):
        def roll_out(self, prompts, version):
            groups = super().roll_out(prompts, version)
            seen.append({int(v) for group in groups for v in group.versions if v >= 0})
            return groups

    outcome = Spy(config, lag=2, eval_every=2, eval_samples=1).run()
    assert seen == [{0}, {0}, {0}, {1}, {2}]
    assert sorted(outcome.curve) == [0, 2, 4, 5]


@pytest.mark.long
def test_a_repeated_training_gives_the_same_metrics(config):
    again = [LaggedTraining(config, lag=0, eval_every=5, eval_samples=1).run() for _ in range(2)]
    assert again[0].metrics == again[1].metrics
    assert again[0].metrics["ratio"] == pytest.approx(1.0, abs=1e-3), "without lag, the ratio must be 1"


def test_the_area_of_a_curve_is_its_mean_over_steps():
    outcome = LaggedOutcome(curve={0: 0.0, 2: 0.4, 4: 0.6}, metrics={}, seconds=1.0)
    assert outcome.final == 0.6
    assert outcome.area == pytest.approx((0.2 * 2 + 0.5 * 2) / 4)


def test_a_result_is_found_only_with_the_settings_of_its_training(tmp_path):
    results = Results(path=tmp_path / "deep" / "cells.jsonl")
    assert results.read() == {}
    results.add(CELL, {"final": 0.5, "area": 0.25})
    assert results.read()[CELL]["final"] == 0.5
    assert replace(CELL, lr=1e-3) not in results.read()


def test_each_correction_changes_the_algorithm_of_the_quickstart(config):
    base = replace(config.algorithm, groups_per_step=8)
    algorithm = CELL.algorithm(base)
    assert (algorithm.anchor, algorithm.weight, algorithm.num_mini_batches) == (Anchor.proximal, Weight.token, 4)
    built = [replace(CELL, correction=name).algorithm(base) for name in CORRECTIONS]
    assert all(one != other for index, one in enumerate(built) for other in built[:index])
    assert set(PUBLISHED) <= set(CORRECTIONS)


def test_the_whole_table_has_120_trainings_and_shows_missing_results(capsys):
    options = argparse.Namespace(
        seeds=[0, 1, 2], eta=[0, 1, 4, 8], corrections=list(PUBLISHED), mini_batches=[1, 4], steps=60, lr=7e-4
    )
    cells = list(cells_of(options))
    assert len(set(cells)) == 120
    print_tables(cells, {CELL: {"final": 0.5, "area": 0.25}})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "1 of 120 trainings are finished"
    assert "| `tis` | — | — | 0.50 (0.50 to 0.50) | — |" in printed
    last = json.loads(printed[-1])
    assert last == {"figures": {"tis/eta=4/updates=4": 0.5}, "finished": 1, "cells": 120}
