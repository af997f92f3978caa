import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from learner.config import OptimizerConfig, Schedule
from learner.trainer import ModelOptimizer, is_matrix, learning_rate
from tests.support.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        (Schedule.constant, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (Schedule.linear, [0.25, 0.5, 0.75, 1.0, 0.55, 0.1]),
        (Schedule.cosine, [0.25, 0.5, 0.75, 1.0, 0.55, 0.1]),
    ],
)
def test_the_learning_rate_warms_up_and_then_follows_its_schedule(schedule, want):
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=3, min_lr_ratio=0.1)
    updates = [0, 1, 2, 3, 8, 13]
    assert [learning_rate(config, update, 13) for update in updates] == pytest.approx(want)


def test_the_learning_rate_stays_at_its_final_value_after_the_last_update():
    assert learning_rate(OptimizerConfig(lr=1.0, schedule=Schedule.linear), 50, 10) == 0.0


def test_weight_decay_applies_only_to_matrices():
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer = ModelOptimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5), total_updates=1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-20)  # a gradient of 0 is not an update
    optimizer.update()
    torch.testing.assert_close(model.weight.detach(), before[0] * 0.95)
    torch.testing.assert_close(model.bias.detach(), before[1])


@pytest.mark.parametrize(
    ("family", "options", "names"),
    [
        ("gpt_oss", {}, ["experts.gate_up_proj_bias", "experts.down_proj_bias"]),
        ("cohere", {"use_qk_norm": True}, ["q_norm.weight", "k_norm.weight"]),
        ("mamba", {"state_size": 8}, ["mixer.A_log"]),
    ],
)
def test_weight_decay_does_not_apply_to_stacked_biases_gains_and_decay_rates(family, options, names):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, initializer_range=0.1, **options))
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    kept = {name for name, parameter in parameters.items() if not is_matrix(name, parameter)}
    assert kept == {name for name in parameters if name.endswith(tuple(names))}
    assert len(kept) == 2 * len(names), "the names must be found in both layers"


def test_the_norm_is_over_all_gradients_and_clips_them_together():
    model = nn.Linear(1, 1)
    optimizer = ModelOptimizer(model, OptimizerConfig(lr=0.0, clip_grad_norm=1.0), total_updates=1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0]]), torch.tensor([4.0])
    assert optimizer.update()["grad_norm"] == pytest.approx(5.0)
    moment = optimizer.adamw.state[model.bias]["exp_avg"].item()
    assert moment == pytest.approx(0.1 * 0.8)  # the clipped gradient times (1 - beta1)


def test_a_non_finite_gradient_is_skipped_and_counted():
    model = nn.Linear(1, 1)
    before = model.weight.item()
    optimizer = ModelOptimizer(model, OptimizerConfig(lr=1.0), total_updates=2)
    model.weight.grad, model.bias.grad = torch.tensor([[math.nan]]), torch.tensor([1.0])
    assert optimizer.update()["skipped_updates"] == 1.0
    assert model.weight.item() == before
    model.weight.grad, model.bias.grad = torch.tensor([[1.0]]), torch.tensor([1.0])
    assert optimizer.update()["skipped_updates"] == 0.0
    assert model.weight.item() != before
