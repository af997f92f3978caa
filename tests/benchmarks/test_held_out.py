import pytest
import torch
from transformers import AutoTokenizer

from asyncrl.cli.quickstart import make_assets
from benchmarks.held_out import first_crossing, load_held_out


class Answerer:
    """A model that reverses prompts. Answers whose indices are in ``spoilt`` are wrong: they get an extra digit."""

    def __init__(self, spoilt=()):
        self.spoilt = set(spoilt)
        self.training = True
        self.calls = []

    def eval(self):
        self.training = False

    def train(self, mode):
        self.training = mode

    def generate(self, input_ids, *, attention_mask, num_return_sequences, max_new_tokens, **options):
        torch.rand(3)
        self.calls.append({"training": self.training, "samples": num_return_sequences, **options})
        rows = []
        for prompt, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
            digits = [token for token, keep in zip(prompt, mask, strict=True) if keep][:-1]
            for _ in range(num_return_sequences):
                answer = digits[::-1] + ([4] if len(rows) in self.spoilt else []) + [1]
                rows.append(prompt + answer + [0] * (max_new_tokens - len(answer)))
        return torch.tensor(rows)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    directory = tmp_path_factory.mktemp("assets") / "assets"
    assets = make_assets(directory, seed=0, num_train=8, num_held_out=10, num_demonstrations=8)
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    return load_held_out(assets.held_out, tokenizer, max_new_tokens=12)


def test_accuracy_is_the_share_of_exact_answers(held_out):
    assert held_out.accuracy(Answerer()) == 1.0
    assert held_out.accuracy(Answerer(spoilt=range(10))) == 70 / 80
    assert held_out.accuracy(Answerer(spoilt=[9]), greedy=True) == 9 / 10


def test_sampling_uses_temperature_one_and_the_whole_vocabulary(held_out):
    model = Answerer()
    held_out.accuracy(model)
    held_out.accuracy(model, greedy=True)

    sampled, greedy = model.calls
    assert (sampled["do_sample"], sampled["temperature"], sampled["top_k"], sampled["top_p"]) == (True, 1.0, 0, 1.0)
    assert (sampled["samples"], greedy["samples"]) == (8, 1)
    assert greedy["do_sample"] is False
    assert not sampled["training"]


def test_evaluation_restores_training_mode_and_random_state(held_out):
    model, before = Answerer(), torch.get_rng_state()

    held_out.accuracy(model)

    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_target_is_reached_when_the_mean_of_three_evaluations_reaches_it():
    rising = [(10.0 * index, 0.1 * index) for index in range(11)]
    assert first_crossing(rising, 0.45) == pytest.approx(45.0)
    lucky = [(x, y + 0.4 * (x == 20)) for x, y in rising]
    assert first_crossing(lucky, 0.6) == pytest.approx(60.0), "the single value of 0.6 at 20 must not count"
    assert first_crossing(rising, 0.99) is None, "the last mean is only 0.95"
    assert first_crossing([(0.0, 0.9), (10.0, 0.9)], 0.5) == 0.0
    dip = [(0.0, 1.0), (10.0, 0.84), (20.0, 0.8), (30.0, 1.0), (40.0, 1.0)]
    assert first_crossing(dip, 0.9) == 0.0, "the first mean, 0.92, reaches the target, although the next one does not"
