"""Sharding options do not change the results of training."""

import contextlib
import itertools
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, Replicate, Shard

from learner import attention, fsdp
from learner.config import AlgorithmConfig, Device, Dtype, GradientSync, LearnerConfig, LoraConfig, Resharding
from learner.fsdp import decoder_layers, parameter_types
from learner.losses import LossInputs, LossTerms, Objective
from learner.packed_model import PackedModel
from learner.roles import REFERENCE
from learner.trainer import Trainer
from tests.support.policy_step import policy_step
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import random_sequences
from tests.support.whole_weights import assert_weights_equal, weights_of

PLAIN = LearnerConfig(device=Device.cpu)


def trained(trainer: Trainer) -> tuple[float, dict[str, np.ndarray]]:
    """Make one step on this rank's sequences. Returns the loss and the new weights."""
    dp = trainer.mesh.num_ranks // trainer.mesh.sp_size
    loss = policy_step(trainer, AlgorithmConfig()).run(random_sequences(8)[trainer.mesh.dp_rank :: dp])["loss"]
    return loss, weights_of(trainer)


def shards_of_own_rows(model_path: str) -> dict[str, Any]:
    """Return facts about this rank's parameters, and the number of bytes that it reads from the model's files."""
    fsdp.MIN_UNIT_NUMEL = 1
    num_bytes, fromfile = [], np.fromfile
    np.fromfile = lambda *a, **k: num_bytes.append(a[2]) or fromfile(*a, **k)
    trainer = Trainer(replace(PLAIN, num_ranks=4, fsdp_size=2), model_path=model_path, total_updates=1)
    parameters = dict(trainer.head.named_parameters())
    seen: dict[str, Any] = {
        "read": sum(num_bytes),
        "placements": {
            type(p.data).__name__ + str(p.placements) for p in parameters.values() if isinstance(p, DTensor)
        },
        "plain": [name for name, p in parameters.items() if not isinstance(p, DTensor)],
        "held": sum(p.to_local().numel() for p in parameters.values() if isinstance(p, DTensor)),
        "whole": sum(p.numel() for p in parameters.values()),
        "rotary": trainer.pretrained.model.rotary_emb.inv_freq.tolist(),
        "tied": trainer.pretrained.lm_head.weight is trainer.pretrained.model.embed_tokens.weight,
    }
    seen["outcome"] = trained(trainer)
    return seen


def test_each_rank_reads_and_stores_only_its_shard_of_the_weights(model_path):
    alone = Trainer(PLAIN, model_path=model_path, total_updates=1)
    rotary = alone.pretrained.model.rotary_emb.inv_freq.tolist()
    loss, weights = trained(alone)
    ranks = run_on_ranks(4, shards_of_own_rows, model_path)
    for seen in ranks:
        assert seen["placements"] == {f"DTensor{(Replicate(), Shard(dim=0))}"}
        assert seen["plain"] == []
        assert seen["held"] == pytest.approx(seen["whole"] / 2, rel=0.05)  # fsdp_size=2
        assert seen["read"] == 4 * seen["held"]
        assert seen["rotary"] == rotary
        assert seen["tied"]
        assert seen["outcome"][0] == pytest.approx(loss, rel=1e-5)
    assert_weights_equal(ranks[0]["outcome"][1], weights, atol=1e-6)


def test_param_offload_has_no_effect_together_with_offload_policy(model_path, caplog):
    from learner.offload import OffloadPolicy

    config = replace(PLAIN, offload_policy=True, param_offload=True)
    trainer = Trainer(config, model_path=model_path, total_updates=1)
    residence = OffloadPolicy(config, trainer.head, trainer.optimizer)
    assert "offload_policy keeps everything on the host already" in caplog.text
    residence.enter_rollout()
    assert not residence.model_offloaded
    trained(trainer)


@pytest.mark.long
def test_compiled_layers_give_the_same_loss_and_weights(model_path, monkeypatch):
    compiled: list[Any] = []
    original = torch.compile

    def note(function: Any, **options: Any) -> Any:
        compiled.append(function)
        # The backend aot_eager traces the function as inductor does, but does not need a C++ compiler.
        return original(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", note)
    loss, weights = trained(Trainer(PLAIN, model_path=model_path, total_updates=1))
    assert compiled == []
    trainer = Trainer(replace(PLAIN, torch_compile=True), model_path=model_path, total_updates=1)
    got_loss, got = trained(trainer)
    assert len(compiled) == len(decoder_layers(trainer.head)) == 2
    assert got_loss == pytest.approx(loss, rel=1e-5)
    assert_weights_equal(got, weights, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"torch_compile": True}, {"lora": LoraConfig(rank=4)}])
def test_layers_recomputed_without_attention_may_be_compiled_or_have_adapters(model_path, monkeypatch, changes):
    original, calls, attended = torch.compile, [], attention.attended
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: original(function, backend="aot_eager", **options)
    )

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return attended(*args, **options)

    monkeypatch.setattr(attention, "attended", counted)
    outcomes, counts = [], []
    for recomputation in (False, True, "selective"):
        config = replace(PLAIN, activation_checkpointing=recomputation, **changes)
        trainer = Trainer(config, model_path=model_path, total_updates=1)
        calls.clear()
        outcomes.append(trained(trainer))
        counts.append(calls.count(True))
    (loss, weights), *others = outcomes
    assert counts == [2, 4, 2]
    for got_loss, got in others:
        assert got_loss == pytest.approx(loss, rel=1e-5)
        assert_weights_equal(got, weights, atol=1e-5)


def test_a_backward_pass_in_another_thread_does_not_compute_attention_again(model_path, monkeypatch):
    """On a GPU, autograd runs the backward pass in a separate thread."""
    calls, attended = [], attention.attended
    monkeypatch.setattr(attention, "attended", lambda *a, **k: calls.append(1) or attended(*a, **k))
    gradients = []
    for recomputation in (False, "selective"):
        config = replace(PLAIN, activation_checkpointing=recomputation)
        trainer = Trainer(config, model_path=model_path, total_updates=1)
        trainer.set_training(True)
        batch = trainer.pack(random_sequences(4)).micro_batches[0]
        loss = trainer.head(batch.to(trainer.mesh.device))[0].sum()
        calls.clear()
        backward = threading.Thread(target=loss.backward)
        backward.start()
        backward.join()
        gradients.append([p.grad.clone() for p in trainer.head.parameters() if p.grad is not None])
    assert not calls
    assert attention._layer.attend is None
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize(("device", "option", "want"), [
    ("cuda", None, True), ("cuda", False, False), ("cpu", None, False), ("cpu", True, True),
])  # fmt: skip
def test_layers_are_compiled_by_default_on_cuda_but_not_on_a_cpu(device, option, want):
    assert fsdp.compiles_layers(LearnerConfig(torch_compile=option), torch.device(device)) is want


@pytest.mark.parametrize("size", [0, 3])
def test_an_fsdp_size_that_does_not_divide_the_ranks_is_refused(size):
    with pytest.raises(ValueError, match=f"fsdp_size must be -1 or divide learner.num_ranks, got fsdp_size={size}"):
        LearnerConfig(num_ranks=4, fsdp_size=size)


@pytest.mark.parametrize(
    ("device", "options", "want"),
    [
        ("cpu", {}, ("float32", "float32", "float32")),
        ("cuda", {}, ("bfloat16", "float32", "bfloat16")),
        ("cuda", {"dtype": Dtype.float32}, ("float32", "float32", "float32")),
        ("cuda", {"frozen_dtype": Dtype.float32}, ("bfloat16", "float32", "float32")),
        ("cpu", {"dtype": Dtype.bfloat16}, ("bfloat16", "float32", "bfloat16")),
    ],
)
def test_the_dtypes_depend_on_the_device_and_the_options(device, options, want, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    types = parameter_types(LearnerConfig(**options), torch.device(device))
    assert (types.compute, types.trained, types.frozen) == tuple(getattr(torch, name) for name in want)


def test_the_error_for_dtype_auto_names_a_gpu_without_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Old GPU")
    with pytest.raises(ValueError, match=r"learner\.dtype=auto needs .* bfloat16, got Old GPU; set .*=float32"):
        parameter_types(LearnerConfig(), torch.device("cuda"))


def frozen_and_adapted(model_path: str, num_ranks: int) -> tuple[list[str], list[str], list[np.ndarray]]:
    """Return three values: the dtypes of a reference and of a policy with adapters, and the reference's log-probs."""
    config = replace(PLAIN, num_ranks=num_ranks, dtype=Dtype.bfloat16)
    reference = PackedModel(config, REFERENCE, model_path=model_path)
    adapted = Trainer(replace(config, lora=LoraConfig(rank=2)), model_path=model_path, total_updates=2)
    policy_step(adapted, AlgorithmConfig()).run(random_sequences(4))
    frozen = {str(p.dtype) for p in reference.head.parameters()}
    held = {f"{p.requires_grad} {p.dtype}" for p in adapted.head.parameters()}
    return sorted(frozen), sorted(held), reference.scores(random_sequences(4))


def test_frozen_weights_have_the_compute_dtype_and_adapters_have_float32(model_path):
    alone = frozen_and_adapted(model_path, 1)
    assert alone[:2] == (["torch.bfloat16"], ["False torch.bfloat16", "True torch.float32"])
    for frozen, held, scores in run_on_ranks(2, frozen_and_adapted, model_path, 2):
        assert (frozen, held) == alone[:2]
        for got, want in zip(scores, alone[2], strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


def reductions(model_path: str) -> dict[str, tuple[int, dict[str, float]]]:
    """Return a pair for each ``gradient_sync`` and resharding: the number of gradient reductions, and the metrics."""
    seen, reduce = {}, _fsdp_param_group.foreach_reduce
    for sync, resharding in itertools.product(GradientSync, Resharding):
        config = replace(PLAIN, num_ranks=2, max_tokens_per_micro_batch=40, gradient_sync=sync, resharding=resharding)
        trainer, calls = Trainer(config, model_path=model_path, total_updates=2), []
        _fsdp_param_group.foreach_reduce = lambda *a, _calls=calls, **k: _calls.append(1) or reduce(*a, **k)
        step = policy_step(trainer, AlgorithmConfig())
        metrics = step.run(random_sequences(12)[trainer.mesh.dp_rank :: 2])
        fail_once(trainer, random_sequences(12)[trainer.mesh.dp_rank :: 2])
        again = step.run(random_sequences(12)[trainer.mesh.dp_rank :: 2])
        seen[f"{sync} {resharding}"] = (len(calls), {**metrics, "again": again["grad_norm"]})
    return seen


def fail_once(trainer: Trainer, sequences: list) -> None:
    """Make an update that fails in its second micro-batch on all ranks."""
    losses = iter([False, True])

    def loss(inputs: LossInputs) -> LossTerms:
        if next(losses):
            raise RuntimeError("no memory")
        return LossTerms(per_token=-100 * inputs.log_probs)

    with contextlib.suppress(RuntimeError):
        trainer.update(sequences, Objective(loss=loss))


@pytest.mark.long
def test_gradients_are_summed_over_the_ranks_once_per_update(model_path):
    alone = Trainer(PLAIN, model_path=model_path, total_updates=2)
    step = policy_step(alone, AlgorithmConfig())
    first, second = (step.run(random_sequences(12)) for _ in range(2))
    seen = run_on_ranks(2, reductions, model_path)[0]
    assert set(seen) == {f"{sync} {resharding}" for sync, resharding in itertools.product(GradientSync, Resharding)}
    for name, (count, metrics) in seen.items():
        assert metrics["num_micro_batches"] >= 3
        assert metrics["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4), name
        assert metrics["again"] == pytest.approx(second["grad_norm"], rel=1e-4), name
        once = not name.startswith("micro_batch")  # on a CPU, ``auto`` means ``update``
        assert count == 2 if once else count >= 6, (name, count)  # one FSDP unit, two updates
