"""Checks docs/algorithms.md: the recipes are valid options, the examples run, and the page names every option."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from asyncrl.checks import check_options
from asyncrl.cli.compose import CONFIG_DIR, compose_run, describe
from asyncrl.config import RunConfig
from learner.advantages import ADVANTAGES, TokenRewards, is_token_level
from learner.config import Aggregation, AlgorithmConfig, Anchor, KLEstimator, Mask, Weight
from learner.losses import LOSSES, policy_objective
from rollout_fleet.rewards import REWARDS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
RECIPES = [line for line in PAGE.split("```text\n")[1].split("```")[0].splitlines() if line]


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_passes_the_checks(recipe):
    config = compose_run([word for word in recipe.split() if "=" in word])
    check_options(config)
    policy_objective(config.algorithm)
    assert config.algorithm != compose_run([]).algorithm


@pytest.mark.parametrize(
    ("option", "registry"),
    [("algorithm.loss", LOSSES), ("algorithm.advantage", ADVANTAGES), ("rollout_fleet.reward", REWARDS)],
)
def test_the_help_names_every_value_of_an_option_that_takes_names(option, registry):
    meaning, _ = describe(RunConfig())[option]
    assert [name for name in registry.names() if f"``{name}``" not in meaning] == []


def test_every_named_correction_is_explained():
    names = [path.stem for path in (CONFIG_DIR / "correction").glob("*.yaml")]
    assert len(names) == 5
    assert [name for name in names if f"| `{name}` | `" not in PAGE] == []


def test_gspo_is_anchored_at_the_proximal_policy():
    (recipe,) = (line for line in RECIPES if line.startswith("GSPO"))
    algorithm = compose_run([word for word in recipe.split() if "=" in word]).algorithm
    assert (algorithm.loss, algorithm.anchor) == ("gspo", Anchor.proximal)
    assert algorithm.num_mini_batches > 1, "with one update per step, the ratio is 1 and is never clipped"


def test_the_algorithms_page_has_recipes():
    assert len(RECIPES) >= 10


def test_the_algorithms_page_explains_every_option_and_name():
    names = [
        field.name for field in fields(AlgorithmConfig) if field.name not in ("groups_per_step", "samples_per_prompt")
    ]
    names += [*ADVANTAGES.names(), *LOSSES.names(), *Aggregation, *Anchor, *Weight, *Mask, *KLEstimator]
    assert [name for name in names if f"`{name}" not in PAGE and f".{name}" not in PAGE] == []


def test_the_example_of_a_users_advantage_runs(tmp_path):
    path = tmp_path / "my_advantages.py"
    path.write_text(PAGE.split("```python\n")[2].split("```")[0])
    estimator = ADVANTAGES.get(f"{path}:discounted")
    assert is_token_level(estimator)
    batch = TokenRewards(
        rewards=torch.tensor([0.0, 4.0]), lengths=torch.tensor([2]), group_ids=torch.tensor([0]), values=torch.zeros(2)
    )
    got = estimator(batch, AlgorithmConfig(advantage=f"{path}:discounted", gamma=0.5), lambda values: values)
    assert got.advantages.tolist() == [2.0, 4.0]
