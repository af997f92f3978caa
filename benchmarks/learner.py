"""Measures the learner's speed and memory: ``python -m benchmarks.learner [--quick]``.

All times are CPU times of one thread. If a figure is a ratio of two times, each repetition measures both times, and the
figure is the median ratio over the repetitions. The comparison with TRL needs the ``bench`` extra. Without the extra,
``step_vs_trl`` is null. The last line of the output is JSON.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from asyncrl.core.types import GroupSummary, Plan
from benchmarks.random_models import save_random_qwen3
from benchmarks.report import Target, print_report
from learner.advantages import generalized_advantages
from learner.attention import ATTENTION_NAME, packed_attention, packed_layout
from learner.batching import group_cost, rank_batches
from learner.config import (
    RENDEZVOUS_FILE,
    AlgorithmConfig,
    Anchor,
    Device,
    LearnerConfig,
    OptimizerConfig,
    Weight,
)
from learner.fsdp import local_tensor, open_mesh
from learner.heads import chunked_log_probs
from learner.losses import policy_objective
from learner.packed_model import PackedModel
from learner.packing import Packer
from learner.roles import REFERENCE
from learner.selftest import SelfTest
from learner.trainer import LearnerStep, Trainer
from learner.types import TokenSequence

VOCABULARY, CLIP, LR = 20, 0.2, 1e-4


def save_model(directory: str) -> str:
    """Save a random policy as large as the quickstart's policy (75 thousand parameters); return the policy's folder."""
    return save_random_qwen3(directory, layers=2, hidden=64, mlp=128, heads=4, head_dim=16, vocab_size=VOCABULARY)


def sequences_of(prompt_lengths: Sequence[int], response_lengths: Sequence[int]) -> list[TokenSequence]:
    """Return sequences of random tokens with the given lengths, and with the columns that a loss reads."""
    rng = np.random.default_rng(0)
    return [
        TokenSequence(
            input_ids=rng.integers(0, VOCABULARY, prompt + response).astype(np.int32),
            loss_mask=np.arange(prompt + response) >= prompt,
            columns={
                "behavior_logprobs": np.full(prompt + response, -3.0, dtype=np.float32),
                "advantages": np.full(prompt + response, rng.normal(), dtype=np.float32),
            },
        )
        for prompt, response in zip(prompt_lengths, response_lengths, strict=True)
    ]


def quickstart_batch() -> list[TokenSequence]:
    """Return the sequences of 32 prompt groups of 8 samples. A sequence has 16 tokens on average."""
    digits = np.random.default_rng(1).integers(5, 9, 32).repeat(8)
    sequences = sequences_of((digits + 2).tolist(), (digits + 1).tolist())
    for index, sequence in enumerate(sequences):
        num_prompt = digits[index] + 2
        sequence.input_ids[:num_prompt] = sequences[index - index % 8].input_ids[:num_prompt]
    return sequences


def long_tailed_batch() -> list[TokenSequence]:
    """Return 96 sequences with log-normal response lengths, as in reasoning: most are short, a few are long."""
    lengths = np.clip(np.random.default_rng(2).lognormal(3.6, 0.9, 96), 4, 400).astype(int)
    return sequences_of([8] * 96, lengths.tolist())


def our_step(model_path: str, sequences: list[TokenSequence], *, share_prompts: bool = True) -> Callable[[], object]:
    """Return a function that makes asyncrl's learner step on ``sequences``: packing, loss, backward and update.

    If ``share_prompts`` is true, the tokens of a group's prompt are computed once for all samples of the group.
    """
    config = LearnerConfig(device=Device.cpu, optimizer=OptimizerConfig(lr=LR), share_prompts=share_prompts)
    trainer = Trainer(config, model_path=model_path, total_updates=10_000)
    step = LearnerStep(trainer, policy_objective(AlgorithmConfig()))
    return lambda: step.run(sequences)


def two_updates(
    model_path: str, sequences: list[TokenSequence], *, separate_forward: bool = False
) -> Callable[[], object]:
    """Return a function that makes a learner step of decoupled PPO with two updates.

    If ``separate_forward`` is true, the step first computes the log-probs of all sequences in a separate forward pass.
    """
    trainer = Trainer(
        LearnerConfig(device=Device.cpu, optimizer=OptimizerConfig(lr=LR)), model_path=model_path, total_updates=10_000
    )
    algorithm = AlgorithmConfig(num_mini_batches=2, anchor=Anchor.proximal, weight=Weight.token)
    step = LearnerStep(trainer, policy_objective(algorithm), num_mini_batches=2)
    halves = [replace(sequence, mini_batch=2 * i // len(sequences)) for i, sequence in enumerate(sequences)]

    def separate() -> object:
        scores = trainer.scores(halves)
        return step.make_updates(
            [s.with_column("proximal_logprobs", score) for s, score in zip(halves, scores, strict=True)]
        )

    return separate if separate_forward else lambda: step.run(halves)


def plain_step(model_path: str, sequences: list[TokenSequence]) -> Callable[[], object]:
    """Return a function that makes a step of a plain PyTorch loop with packed tokens and the learner's attention."""
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation=ATTENTION_NAME, dtype=torch.float32)
    (batch,) = Packer(max_tokens=1_000_000).pack(sequences)
    layout = packed_layout(batch.lengths, torch.device("cpu"))

    def forward() -> torch.Tensor:
        hidden = model.model(
            batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, packed=layout
        )
        logits = model.lm_head(hidden.last_hidden_state[0])
        return F.log_softmax(logits, dim=-1)[batch.predict_index].gather(-1, batch.targets[:, None])[:, 0]

    columns = batch.columns
    return _looped(model, forward, columns["behavior_logprobs"], columns["advantages"])


def padded_step(model_path: str, sequences: list[TokenSequence]) -> Callable[[], object]:
    """Return a function that makes a step of a plain PyTorch loop. All sequences are padded to the longest sequence."""
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="sdpa", dtype=torch.float32)
    longest = max(len(sequence.input_ids) for sequence in sequences)
    padded = [np.pad(s.input_ids, (0, longest - len(s.input_ids))) for s in sequences]
    ids = torch.from_numpy(np.stack(padded).astype(np.int64))
    mask = torch.arange(longest) < torch.tensor([len(s.input_ids) for s in sequences])[:, None]
    in_loss = torch.from_numpy(np.stack([np.pad(s.loss_mask, (0, longest - len(s.loss_mask))) for s in sequences]))[
        :, 1:
    ]

    def forward() -> torch.Tensor:
        logits = model(ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
        return F.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None])[..., 0][in_loss]

    behavior = torch.from_numpy(np.concatenate([s.columns["behavior_logprobs"][s.loss_mask] for s in sequences]))
    advantages = torch.from_numpy(np.concatenate([s.columns["advantages"][s.loss_mask] for s in sequences]))
    return _looped(model, forward, behavior, advantages)


def _looped(
    model: torch.nn.Module, forward: Callable[[], torch.Tensor], behavior: torch.Tensor, advantages: torch.Tensor
) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def step() -> float:
        ratio = (forward() - behavior).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def trl_step(model_path: str, sequences: list[TokenSequence]) -> Callable[[], object] | None:
    """Return a function that makes a training step of TRL's GRPOTrainer on ``sequences``.

    Return None if TRL is not installed.
    """
    try:
        from benchmarks.learner_trl import grpo_step
    except ImportError as error:
        print(f"TRL is not measured: {error}")
        return None
    return grpo_step(model_path, sequences, lr=LR, clip=CLIP)


def speed_ratio(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> dict[str, float]:
    """Time two functions alternately, with ``rounds`` repetitions.

    Returns:
        ``ratio``: the time of ``theirs`` divided by the time of ``ours``, as the median over the repetitions.
        ``ours_ms`` and ``theirs_ms``: the median times in milliseconds.
    """
    ours()
    theirs()
    pairs = [(_seconds(ours), _seconds(theirs)) for _ in range(rounds)]
    return {
        "ratio": round(statistics.median(other / own for own, other in pairs), 3),
        "ours_ms": round(1e3 * statistics.median(own for own, _ in pairs), 1),
        "theirs_ms": round(1e3 * statistics.median(other for _, other in pairs), 1),
    }


def _seconds(step: Callable[[], object]) -> float:
    """Call ``step`` and return the CPU seconds of the call.

    Because ``step`` uses one thread, other work of the machine hardly changes this value.
    """
    start = time.process_time()
    step()
    return time.process_time() - start


def peak_log_prob_bytes(way: str, num_tokens: int, vocabulary: int) -> int:
    """Return the peak memory in bytes of a forward and backward pass for the log-probs of ``num_tokens`` tokens.

    The peak excludes the inputs and their gradients. If ``way`` is "ours", the learner's function computes the
    log-probs in chunks. If ``way`` is "naive", all logits exist at the same time. A separate process measures the peak.
    """
    command = [sys.executable, "-m", "benchmarks.learner", "--peak", way, str(num_tokens), str(vocabulary)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return int(answer.stdout.splitlines()[-1])


def print_peak(way: str, num_tokens: int, vocabulary: int) -> None:
    """Measure and print the peak bytes of this process. `peak_log_prob_bytes` has started the process."""
    hidden, weight = torch.randn(num_tokens, 64, requires_grad=True), torch.randn(vocabulary, 64, requires_grad=True)
    targets = torch.randint(0, vocabulary, (num_tokens,))
    (hidden[:8] @ weight[:8].t()).sum().backward()  # Allocate the gradients of both inputs.
    Path("/proc/self/clear_refs").write_text("5")  # Reset the peak memory of the process.
    before = _peak_bytes()
    if way == "ours":
        chunk = LearnerConfig().logprob_chunk_tokens
        log_probs, _ = chunked_log_probs(hidden, weight, None, targets, temperature=1.0, chunk_tokens=chunk)
    else:
        log_probs = F.log_softmax((hidden @ weight.t()).float(), dim=-1).gather(-1, targets[:, None])[:, 0]
    log_probs.sum().backward()
    print(_peak_bytes() - before)


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def load_memory_ratio(directory: str, num_ranks: int = 4) -> float:
    """Return the peak memory of a rank during the load of a model, divided by the size of the rank's shards.

    The result is the largest ratio of all ranks. The model has 100 million parameters in several files. This function
    saves the model in the folder ``directory``.
    """
    model = save_random_qwen3(directory, layers=8, hidden=768, mlp=3072, heads=12, head_dim=64, vocab_size=16_000)
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(f"{directory}/parts", max_shard_size="100MB")
    command = [sys.executable, "-m", "benchmarks.learner", "--load", f"{directory}/parts"]
    meeting = {**os.environ, "WORLD_SIZE": str(num_ranks), RENDEZVOUS_FILE: f"{directory}/meeting"}
    ranks = [
        subprocess.Popen(command, env={**meeting, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    return max(float(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks)


def print_load_memory(model_path: str) -> None:
    """Load the model on one rank, and print the peak memory divided by the size of the rank's shards.

    `load_memory_ratio` starts one process per rank. Each process calls this function.
    """
    options = {"device": Device.cpu, "num_ranks": int(os.environ["WORLD_SIZE"]), "skip_selftest": "measures the load"}
    mesh = open_mesh(LearnerConfig(**options))
    mesh.largest(torch.ones(1))  # Open gloo's connections before the measurement.
    # Load a small model, so that all modules are imported before the measurement.
    PackedModel(LearnerConfig(**options), REFERENCE, model_path=save_model(tempfile.mkdtemp()))
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    model = PackedModel(LearnerConfig(**options), REFERENCE, model_path=model_path)
    shards = sum(local_tensor(parameter.detach()).nbytes for parameter in model.head.parameters())
    print((_peak_bytes() - before) / shards)
    mesh.largest(torch.ones(1))  # Wait for all ranks, because the other ranks fail if one rank ends early.


def balance_max_over_mean() -> float:
    """Return how unevenly a batch is divided among ranks: the largest cost of a rank, divided by the mean cost.

    The result is the largest value of 8 batches. The responses have the lengths of reasoning traces. Four batches have
    32 prompt groups and are divided among 16 ranks. The other four batches have 64 prompt groups and are divided among
    64 ranks. Each group has 8 samples.
    """
    worst = 0.0
    for (num_groups, num_ranks), seed in itertools.product([(32, 16), (64, 64)], range(4)):
        rng = np.random.default_rng(seed)
        scale = rng.lognormal(6.5, 0.6, (num_groups, 1))
        lengths = np.clip(scale * rng.lognormal(0.0, 0.4, (num_groups, 8)), 16, 4096).astype(int)
        plan = Plan(version=0, groups=[_summary(group, row.tolist()) for group, row in enumerate(lengths)])
        costs = {group.group_id: group_cost(group) for group in plan.groups}
        batches = rank_batches(plan, AlgorithmConfig(groups_per_step=num_groups), num_shards=num_ranks, max_lag=0)
        loads = [sum(costs[share.group_id].of(share.samples) for share in batch.shares) for batch in batches]
        worst = max(worst, max(loads) / statistics.mean(loads))
    return worst


def tokens_vs_ideal(num_prompt: int, num_samples: int, num_response: int, budget: int = 16_384) -> float:
    """Return how many tokens the learner computes for 8 prompt groups, divided by the smallest possible number.

    The smallest possible number includes the tokens of each prompt and each response once. A prompt has ``num_prompt``
    tokens and ``num_samples`` responses. A response has ``num_response`` tokens. A micro-batch has at most ``budget``
    tokens.
    """
    sequences = sequences_of([num_prompt] * 8 * num_samples, [num_response] * 8 * num_samples)
    for index, sequence in enumerate(sequences):
        sequence.input_ids[:num_prompt] = index // num_samples  # Give each group a different prompt.
    batches = Packer(max_tokens=budget, whole=False, share_prompts=True).pack(sequences)
    ideal = 8 * (num_prompt + num_samples * num_response)
    return sum(len(batch.input_ids) for batch in batches) / ideal


def _summary(group_id: int, lengths: list[int]) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        attempt=0,
        num_prompt_tokens=128,
        response_lengths=tuple(lengths),
        num_tokens=sum(lengths),
        oldest_version=0,
        newest_version=0,
        rewards=(0.0,) * len(lengths),
    )


def window_attention_ratio(rounds: int, num_tokens: int = 4096, window: int = 128) -> float:
    """Return the time of sliding-window attention, divided by the time of the same attention with a dense mask.

    Both times include the forward and the backward pass.
    """
    q, k, v = (torch.randn(1, heads, num_tokens, 64, requires_grad=True) for heads in (8, 2, 2))
    layout = packed_layout((num_tokens,), torch.device("cpu"))

    def ours() -> None:
        out, _ = packed_attention(torch.nn.Module(), q, k, v, None, packed=layout, sliding_window=window)
        out.sum().backward()

    def dense() -> None:
        seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril().triu(1 - window)
        F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).sum().backward()

    return speed_ratio(dense, ours, rounds)["ratio"]


def frozen_head_ratio(rounds: int, num_tokens: int = 512, vocabulary: int = 80_000) -> float:
    """Return the time of log-prob gradients with a frozen output layer, divided by the time with a trained layer.

    The time of the gradients is the time of a forward and backward pass, minus the time of a forward pass without
    gradients. The result is the median over ``rounds`` repetitions. The gradients take one matrix product with a frozen
    layer, and three matrix products of the same size with a trained layer.
    """
    hidden, weight = torch.randn(num_tokens, 256, requires_grad=True), torch.randn(vocabulary, 256)
    targets = torch.zeros(num_tokens, dtype=torch.int64)
    trained = weight.clone().requires_grad_()

    def log_probs(states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return chunked_log_probs(states, output, None, targets, temperature=1.0, chunk_tokens=256)[0]

    def added_s(output: torch.Tensor) -> float:
        without_s = _seconds(lambda: log_probs(hidden.detach(), output.detach()))
        return _seconds(lambda: log_probs(hidden, output).sum().backward()) - without_s

    added_s(trained)  # Allocate the gradients before the measurement.
    return statistics.median(added_s(weight) / added_s(trained) for _ in range(rounds))


def gae_seconds() -> float:
    """Return the median seconds to compute generalized advantages (GAE) of 64 trajectories of 16,384 tokens."""
    lengths = torch.full((64,), 16_384)
    rewards, values = torch.randn(2, int(lengths.sum()), dtype=torch.float64)

    def run() -> object:
        return generalized_advantages(rewards, values, lengths, gamma=0.99, gae_lambda=0.95)

    run()
    return statistics.median(_seconds(run) for _ in range(7))


def measure(rounds: int, num_tokens: int, vocabulary: int) -> tuple[dict[str, str], dict[str, float | None]]:
    """Measure everything. Return a pair: the lines of the table (text by name) and the figures (number by name)."""
    rows: dict[str, str] = {}
    figures: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as directory:
        path, batch, tailed = save_model(directory), quickstart_batch(), long_tailed_batch()
        comparisons = {
            "step_vs_plain_loop": (batch, plain_step(path, batch)),
            "shared_vs_own_prompts": (batch, our_step(path, batch, share_prompts=False)),
            "packed_vs_padded": (tailed, padded_step(path, tailed)),
            "step_vs_trl": (batch, trl_step(path, batch)),
        }
        separate = speed_ratio(two_updates(path, tailed), two_updates(path, tailed, separate_forward=True), rounds)
        figures["first_forward_vs_separate"] = separate["ratio"]
        rows["first_forward_vs_separate"] = f"ours {separate['ours_ms']} ms, theirs {separate['theirs_ms']} ms"
        figures["selftest_s"] = round(selftest_seconds(path, rounds), 4)
        rows["selftest_s"] = f"{figures['selftest_s']} s for a model of 75 thousand parameters"
        for name, (sequences, theirs) in comparisons.items():
            detail = speed_ratio(our_step(path, sequences), theirs, rounds) if theirs else None
            figures[name] = detail["ratio"] if detail else None
            rows[name] = f"ours {detail['ours_ms']} ms, theirs {detail['theirs_ms']} ms" if detail else "trl is missing"
    peaks = {way: peak_log_prob_bytes(way, num_tokens, vocabulary) for way in ("ours", "naive")}
    figures["logprob_memory_vs_naive"] = peaks["ours"] / peaks["naive"]
    rows["logprob_memory_vs_naive"] = f"ours {peaks['ours'] / 1e6:.0f} MB, naive {peaks['naive'] / 1e6:.0f} MB"
    with tempfile.TemporaryDirectory() as directory:
        figures["load_memory_vs_shard"] = round(load_memory_ratio(directory), 4)
    rows["load_memory_vs_shard"] = "peak memory of loading ÷ the rank's shards, on four gloo ranks"
    figures["balance_max_over_mean"] = balance_max_over_mean()
    rows["balance_max_over_mean"] = "the fullest of 16 ranks with 16 sequences each, or of 64 ranks with 8"
    figures["prompt_sharing_4k_8x400"] = round(tokens_vs_ideal(4000, 8, 400), 4)
    figures["prompt_sharing_8k_8x300"] = round(tokens_vs_ideal(8000, 8, 300), 4)
    rows["prompt_sharing_4k_8x400"] = "packed tokens ÷ ideal, 8 prompts of 4,000 tokens with 8 samples of 400"
    rows["prompt_sharing_8k_8x300"] = "packed tokens ÷ ideal, 8 prompts of 8,000 tokens with 8 samples of 300"
    figures["window_attention_vs_dense"] = round(window_attention_ratio(rounds), 4)
    rows["window_attention_vs_dense"] = "forward and backward of 4,096 tokens in a window of 128, against a dense mask"
    figures["frozen_head_backward_ratio"] = round(frozen_head_ratio(rounds), 4)
    rows["frozen_head_backward_ratio"] = "gradients of log-probs with a vocabulary of 80,000, frozen against trained"
    figures["gae_s"] = gae_seconds()
    rows["gae_s"] = "64 trajectories of 16,384 tokens"
    return rows, figures


def selftest_seconds(model_path: str, rounds: int) -> float:
    """Return the median CPU seconds of the self-test that a rank runs after it has loaded a model."""
    model = PackedModel(LearnerConfig(device=Device.cpu), REFERENCE, model_path=model_path)
    test = SelfTest(model.head, model.mesh, model.sharding, dtype=model.types.compute, name=model_path)
    return statistics.median(_seconds(test.run) for _ in range(rounds))


TARGETS = {
    "balance_max_over_mean": Target(at_most=1.05),
    "gae_s": Target(at_most=0.05),
    "selftest_s": Target(at_most=1.0),
    "step_vs_plain_loop": Target(at_least=0.95),
    "logprob_memory_vs_naive": Target(at_most=0.25),
    "load_memory_vs_shard": Target(at_most=1.3),
    "shared_vs_own_prompts": Target(at_least=1.2),
    "prompt_sharing_4k_8x400": Target(at_most=1.1),
    "prompt_sharing_8k_8x300": Target(at_most=1.1),
    "window_attention_vs_dense": Target(at_most=0.15),
    "frozen_head_backward_ratio": Target(at_most=0.65),
    "packed_vs_padded": Target(at_least=1.8),
    "first_forward_vs_separate": Target(at_least=1.05),
    "step_vs_trl": Target(at_least=1.5),
}


def main() -> None:
    """Measure the learner. Print a table, then the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions and a small vocabulary")
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=150_000,
        help="vocabulary for the memory of log-probs; the naive method needs 12 bytes x N x V",
    )
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        print_peak(args.peak[0], int(args.peak[1]), int(args.peak[2]))
        return
    if args.load:
        print_load_memory(args.load)
        return
    vocabulary = 16_000 if args.quick else args.vocabulary
    rows, figures = measure(5 if args.quick else 21, 8192, vocabulary)
    title = f"the learner on one thread; log-probs of 8192 tokens, vocabulary {vocabulary}"
    print_report(
        title,
        rows,
        figures,
        TARGETS,
        baseline="a plain loop, a padded loop, a step without shared prompts, naive log-probs, TRL's step, "
        "proximal log-probs from a forward over the whole batch",
    )


if __name__ == "__main__":
    main()
