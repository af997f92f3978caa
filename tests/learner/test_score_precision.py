"""Values and reward scores of a bfloat16 model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from learner import heads
from learner.heads import SCORE_HEAD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_is_float32_and_not_rounded_to_the_type_of_the_model(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(64, 1, bias=True).to(dtype)
    with torch.no_grad():
        linear.bias.fill_(100.0)  # bfloat16 has steps of 0.5 there
    hidden = torch.randn(50, 64).to(dtype)
    head = SimpleNamespace(pretrained=SimpleNamespace(**{SCORE_HEAD: linear}), hidden_states=lambda batch: hidden)
    (scores,) = heads._scores_at(head, None, torch.arange(50))
    exact = hidden.double() @ linear.weight.double().T[:, 0] + linear.bias.double()
    assert scores.dtype is torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=0, atol=1e-4)
    scores.sum().backward()
    assert linear.weight.grad.dtype is dtype
