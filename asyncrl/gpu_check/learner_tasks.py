"""The learner's tasks of ``asyncrl check-gpu``: kernels, log-probs, learner steps, offloading and checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.gpu_check.tasks import Setup, Sizes
from learner.attention_kernels import AttentionShape, attention_kernel, call_kernel, check_kernel
from learner.checkpoint import ShardedCheckpointer
from learner.config import AlgorithmConfig, AttentionKernel, Device, GradientSync, LearnerConfig
from learner.fsdp import local_tensor
from learner.heads import chunked_log_probs
from learner.losses import policy_objective
from learner.offload import OffloadPolicy
from learner.trainer import LearnerStep, Trainer
from learner.types import TokenSequence

NUM_ROUND_TRIPS = 3
_REFERENCE_TOKENS = 128
Measured = Iterator[dict[str, Any]]


def save_model(directory: Path, sizes: Sizes, *, experts: bool, dtype: str) -> str:
    """Save a model with the sizes ``sizes`` and random weights in ``directory``. Return the path of the directory.

    ``experts`` selects a mixture of experts instead of a dense model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": sizes.moe_hidden if experts else sizes.hidden,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": 32768,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02 if sizes.hidden > 1000 else 0.2,
    }
    if experts:
        shape |= {
            "num_experts": sizes.experts,
            "num_experts_per_tok": min(8, sizes.experts // 2),
            "moe_intermediate_size": sizes.expert_mlp,
        }
    config = AutoConfig.for_model("qwen3_moe" if experts else "qwen3", **shape)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(directory)
    return str(directory)


def models(setup: Setup, *, experts: bool) -> Measured:
    """Save a model with random weights for later tasks. Yields one mapping: the model's path and size in bytes."""
    folder = Path(setup.folder, "mixture" if experts else "dense")
    path = save_model(folder, setup.sizes, experts=experts, dtype=setup.dtype)
    yield {"path": path, "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors"))}


# Kernels


def kernels(setup: Setup) -> Measured:
    """Compare the attention kernels with float32 attention, and measure their speeds. On the CPU, only select a kernel.

    Yields a mapping per compared kernel, with the speed in TFLOP/s or an error. The last mapping names the kernel that
    ``learner.attention=auto`` selects.
    """
    device, sizes = torch.device(setup.device), setup.sizes
    dtype = getattr(torch, setup.dtype)
    shape = AttentionShape(head_dim=sizes.head_dim, heads_per_kv_head=sizes.heads // sizes.kv_heads)
    if setup.device == "cuda":
        for kernel in AttentionKernel:
            if kernel not in (AttentionKernel.auto, AttentionKernel.sdpa):
                try:
                    check_kernel(kernel, device, dtype, shape)
                except ValueError as error:
                    yield {"kernel": kernel.value, "error": str(error)}
                else:
                    yield {"kernel": kernel.value, "tflops": _kernel_tflops(kernel, device, dtype, sizes)}
    yield {"selected": attention_kernel(AttentionKernel.auto, device, dtype, shape).value}


def _kernel_tflops(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """Return the speed of the kernel's forward and backward pass together, in TFLOP/s of causal attention."""
    lengths = [sizes.length] * sizes.num_sequences
    shapes = [(sum(lengths), heads, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
    q, k, v = (torch.randn(size, device=device, dtype=dtype, requires_grad=True) for size in shapes)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()

    def step() -> None:
        options = {"starts": starts, "longest": sizes.length, "scale": None, "window": None, "soft_cap": None}
        call_kernel(kernel, q, k, v, **options).sum().backward()

    # The backward pass needs 2.5 times the operations of the forward pass.
    flops = 3.5 * sum(2 * length**2 for length in lengths) * sizes.heads * sizes.head_dim
    return flops / _median_s(step, device) / 1e12


def _median_s(step: Callable[[], object], device: torch.device, num_runs: int = 5) -> float:
    """Return the median wall time of a call of ``step``, in seconds.

    The first call is not measured, because it may compile.
    """
    times = []
    for _ in range(num_runs + 1):
        _synchronize(device)
        began = time.perf_counter()
        step()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:]))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def log_probs(setup: Setup) -> Measured:
    """Compare chunked log-probs and their gradients with float64, and measure time and peak memory.

    Yields one mapping: the largest error in nats, the relative error of the gradient, tokens per second, and peak
    bytes.
    """
    device, sizes = torch.device(setup.device), setup.sizes
    num_tokens = sizes.num_sequences * sizes.length // 4
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, sizes.hidden, device=device, dtype=getattr(torch, setup.dtype))
    weight = (torch.randn(sizes.head_vocabulary, sizes.hidden, device=device) * sizes.hidden**-0.5).to(hidden.dtype)
    targets = torch.randint(sizes.head_vocabulary, (num_tokens,), device=device)
    hidden.requires_grad_()
    weight.requires_grad_()
    before = torch.cuda.memory_allocated(device) if setup.device == "cuda" else 0
    found = torch.empty(0)

    def step() -> None:
        nonlocal found
        hidden.grad = weight.grad = None
        found, _ = chunked_log_probs(hidden, weight, None, targets, temperature=1.0, chunk_tokens=1024, entropy=False)
        found.sum().backward()

    seconds = _median_s(step, device, num_runs=3)
    part = slice(0, _REFERENCE_TOKENS)
    wide = weight.detach().double()
    expected = (hidden[part].detach().double() @ wide.t()).log_softmax(-1)
    chosen = expected.gather(1, targets[part, None])[:, 0]
    gradient = wide[targets[part]] - expected.exp() @ wide
    assert hidden.grad is not None
    yield {
        "error": float((found[part].detach().double() - chosen).abs().max()),
        "gradient_error": float((hidden.grad[part].double() - gradient).norm() / gradient.norm()),
        "tokens_per_s": num_tokens / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) - before if setup.device == "cuda" else 0,
    }


# Learner steps


def sequences_of(sizes: Sizes, *, part: int = 0, parts: int = 1) -> list[TokenSequence]:
    """Return a part of a random batch: every ``parts``-th sequence, beginning with the sequence at index ``part``.

    The batch has four samples per prompt. A quarter of each sequence is the prompt.
    """
    rng = np.random.default_rng(0)
    num_prompt, batch = sizes.length // 4, []
    for index in range(sizes.num_sequences):
        ids = rng.integers(sizes.vocabulary // 2, sizes.vocabulary, sizes.length).astype(np.int32)
        if index % 4:
            ids[:num_prompt] = batch[index - index % 4].input_ids[:num_prompt]
        columns = {
            "behavior_logprobs": np.full(sizes.length, -np.log(sizes.vocabulary), dtype=np.float32),
            "advantages": np.full(sizes.length, rng.normal(), dtype=np.float32),
        }
        mask = np.arange(sizes.length) >= num_prompt
        batch.append(TokenSequence(input_ids=ids, loss_mask=mask, columns=columns))
    return batch[part::parts]


def _trainer(setup: Setup, model: str, *, num_ranks: int = 1, **options: Any) -> Trainer:
    config = LearnerConfig(
        device=Device(setup.device),
        num_ranks=num_ranks,
        max_tokens_per_micro_batch=setup.sizes.budget(num_ranks),
        gradient_sync=GradientSync.micro_batch,
        step_timeout_s=setup.timeout_s,
        **options,
    )
    return Trainer(config, model_path=model, total_updates=100)


def train(
    setup: Setup, *, model: str, sp_size: int, activation_checkpointing: bool | str, torch_compile: bool
) -> Measured:
    """Repeat a learner step on the same batch.

    Yields one mapping: loss and gradient norm of the first step, tokens per second, peak bytes and number of
    parameters.
    """
    num_ranks = int(os.environ["WORLD_SIZE"])
    trainer = _trainer(
        setup,
        model,
        num_ranks=num_ranks,
        sp_size=sp_size,
        activation_checkpointing=activation_checkpointing,
        torch_compile=torch_compile,
    )
    mesh = trainer.mesh
    sequences = sequences_of(setup.sizes, part=mesh.dp_rank, parts=num_ranks // sp_size)
    step = LearnerStep(trainer, policy_objective(AlgorithmConfig(report_entropy=False)))
    first = step.run(sequences)
    if setup.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = _median_s(lambda: step.run(sequences), mesh.device, num_runs=setup.sizes.num_steps)
    num_tokens = setup.sizes.num_sequences * setup.sizes.length
    peak = torch.cuda.max_memory_allocated() if setup.device == "cuda" else 0
    parameters = sum(parameter.numel() for parameter in trainer.head.parameters())
    yield {
        "loss": first["loss"],
        "grad_norm": first["grad_norm"],
        "tokens_per_s": num_tokens / seconds,
        "peak_bytes": int(mesh.largest(torch.tensor(peak))),
        "parameters": parameters,
    }
    dist.destroy_process_group()


def offload(setup: Setup, *, model: str) -> Measured:
    """Move model and optimizer to the host and back, and check that the values stay the same.

    Yields one mapping: the speed in GB/s, the fraction of bytes that stay on the device, and whether the values are the
    same.
    """
    trainer = _trainer(setup, model, offload_at_transition_only=True)
    LearnerStep(trainer, policy_objective(AlgorithmConfig())).run(sequences_of(setup.sizes))
    policy = OffloadPolicy(trainer.config, trainer.head, trainer.optimizer)
    before, seconds = _sums(trainer), []
    for _ in range(NUM_ROUND_TRIPS):
        began = time.perf_counter()
        policy.enter_rollout()
        policy.enter_training()
        _synchronize(trainer.mesh.device)
        seconds.append(time.perf_counter() - began)
    moved, kept = (policy.metrics[f"rollout_device_bytes_{when}"] for when in ("before", "after"))
    is_same = torch.equal(before, _sums(trainer))
    yield {"gb_per_s": 2 * (moved - kept) / min(seconds) / 1e9, "kept_share": kept / moved, "is_same": is_same}


def checkpoint(setup: Setup, *, model: str) -> Measured:
    """Save a checkpoint in the background and load it again.

    Yields one mapping: ``stall_s`` (seconds that training waits), the speed in GB/s, and whether the values are the
    same.
    """
    trainer = _trainer(setup, model)
    LearnerStep(trainer, policy_objective(AlgorithmConfig())).run(sequences_of(setup.sizes))
    checkpointer = ShardedCheckpointer(trainer, str(Path(setup.folder, "checkpoints")))
    saved, began = _sums(trainer), time.perf_counter()
    path = checkpointer.save(1, wait=False)
    stalled = time.perf_counter()
    checkpointer.finish()
    written = time.perf_counter()
    with torch.no_grad():
        for parameter in trainer.head.parameters():
            local_tensor(parameter).add_(1.0)
    checkpointer.load(path)
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    yield {
        "stall_s": stalled - began,
        "gb_per_s": num_bytes / (written - began) / 1e9,
        "is_same": torch.equal(saved, _sums(trainer)),
    }


def _sums(trainer: Trainer) -> Tensor:
    """Return the sum of each parameter and of each moment of the optimizer, [number of tensors] float64."""
    moments = [state[name] for state in trainer.optimizer.adamw.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return torch.stack([local_tensor(x.detach()).double().sum().cpu() for x in [*trainer.head.parameters(), *moments]])
