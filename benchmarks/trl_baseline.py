"""Measures the training time to a held-out accuracy with TRL's GRPOTrainer, configured for speed on two CPU cores.

``python -m benchmarks.trl_baseline --model WARM --train A --held-out B`` runs in one process and prints one JSON line
at the end. The clock starts at the first step and stops during evaluation. The start-up time is reported separately.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

import psutil
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.held_out import HeldOut, first_crossing, load_held_out


@dataclass(frozen=True, kw_only=True)
class TrlSettings:
    """Settings of one run.

    Attributes:
        model: Directory of the warm-started policy and its tokenizer.
        train: Parquet file of training prompts, with columns prompt and ground_truth.
        held_out: Parquet file of held-out prompts, with the same columns.
        seed: Seed of data order and sampling.
        max_steps: Largest number of optimizer updates. The learning rate falls linearly to 0 over these updates.
        groups_per_step: Prompts of one update.
        samples_per_prompt: Rollouts of one prompt.
        max_new_tokens: Longest rollout.
        lr: Learning rate of the first update.
        beta1: AdamW's decay of the first moment.
        beta2: AdamW's decay of the second moment.
        weight_decay: AdamW's weight decay. It applies only to matrices.
        clip: PPO clips the ratio to 1 ± clip.
        clip_grad_norm: Largest global gradient norm.
        eval_every: Updates between evaluations.
        target: Sampled held-out accuracy at which the run ends.
        threads: Number of threads of torch.
    """

    model: str
    train: str
    held_out: str
    seed: int = 0
    max_steps: int = 200
    groups_per_step: int = 32
    samples_per_prompt: int = 8
    max_new_tokens: int = 12
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.01
    clip: float = 0.2
    clip_grad_norm: float = 1.0
    eval_every: int = 10
    target: float = 0.90
    threads: int = 2


@dataclass(frozen=True, kw_only=True)
class TrlResult:
    """The measurements of a run.

    Attributes:
        time_to_target_s: Training seconds until the target is reached, as `first_crossing` computes it. None if
            ``max_steps`` updates do not reach the target.
        steps_to_target: Number of updates until the target is reached. None if the target is not reached.
        startup_s: Seconds from the start of the process to the first step, excluding the first evaluation.
        steps: Number of updates.
        train_s: Training seconds of all updates.
        cpu_s: CPU seconds of the process, including the start and excluding evaluations.
        accuracy_curve: [updates, training seconds, sampled accuracy] at each evaluation.
    """

    time_to_target_s: float | None
    steps_to_target: float | None
    startup_s: float
    steps: int
    train_s: float
    cpu_s: float
    accuracy_curve: list[list[float]]


class StoppedClock:
    """A clock for training time. The clock can be stopped and continued."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start or continue the clock."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock. A second call has no effect."""
        if self._since is not None:
            self.elapsed_s += time.perf_counter() - self._since
        self._since = None


class TargetCallback(TrainerCallback):
    """Stops the clock and evaluates the policy, before the first step and after every ``eval_every`` steps.

    If the accuracy has reached the target, the callback ends the training.
    """

    def __init__(self, settings: TrlSettings, held_out: HeldOut) -> None:
        self.settings = settings
        self.held_out = held_out
        self.clock = StoppedClock()
        self.curve: list[list[float]] = []
        self.startup_s = 0.0
        self.evaluation_cpu_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the start-up time, measure the accuracy before training, and start the clock."""
        self.startup_s = time.time() - psutil.Process().create_time()
        self._measure(kwargs["model"], 0)
        self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock and evaluate the policy, if an evaluation is due or the step is the last one.

        End the training if the accuracy has reached the target.
        """
        if state.global_step % self.settings.eval_every and state.global_step < self.settings.max_steps:
            return
        self.clock.stop()
        self._measure(kwargs["model"], state.global_step)
        reached = self.crossing(0) is not None
        control.should_training_stop = control.should_training_stop or reached
        if not control.should_training_stop:
            self.clock.start()

    def crossing(self, column: int) -> float | None:
        """Return the number of updates (``column`` 0) or of training seconds (``column`` 1) until the target.

        Return None if the target was not reached.
        """
        return first_crossing([(row[column], row[2]) for row in self.curve], self.settings.target)

    def _measure(self, model: Any, step: int) -> None:
        began_s = time.process_time()
        accuracy = self.held_out.accuracy(model)
        self.evaluation_cpu_s += time.process_time() - began_s
        self.curve.append([step, round(self.clock.elapsed_s, 3), round(accuracy, 4)])


def run(settings: TrlSettings) -> TrlResult:
    """Train until the accuracy reaches the target, or for ``max_steps`` updates; return the figures of the run."""
    torch.set_num_threads(settings.threads)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    held_out = load_held_out(settings.held_out, tokenizer, max_new_tokens=settings.max_new_tokens)
    callback = TargetCallback(settings, held_out)
    with tempfile.TemporaryDirectory() as directory:
        trainer = _trainer(settings, model, tokenizer, callback, directory)
        trainer.train()
    return TrlResult(
        time_to_target_s=callback.crossing(1),
        steps_to_target=callback.crossing(0),
        startup_s=round(callback.startup_s, 3),
        steps=trainer.state.global_step,
        train_s=round(callback.clock.elapsed_s, 3),
        cpu_s=round(time.process_time() - callback.evaluation_cpu_s, 3),
        accuracy_curve=callback.curve,
    )


def _trainer(settings: TrlSettings, model: Any, tokenizer: Any, callback: Any, directory: str) -> Any:
    """Make a GRPOTrainer in its fastest configuration.

    Per step, the trainer makes one generation and one forward pass. The trainer does not log or save.
    """
    from datasets import Dataset  # pyright: ignore[reportMissingImports] - needs the bench extra
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports] - needs the bench extra
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports] - needs the bench extra

    config = GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        seed=settings.seed,
        max_steps=settings.max_steps,
        # Make one update per generated batch. Then the PPO ratio is 1, and TRL needs no forward pass for old log-probs.
        per_device_train_batch_size=settings.groups_per_step * settings.samples_per_prompt,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=settings.samples_per_prompt,
        max_completion_length=settings.max_new_tokens,
        temperature=1.0,
        # The loss is the token mean over the batch, without a KL term.
        # Rewards are centered and divided by the group's standard deviation.
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        epsilon=settings.clip,
        learning_rate=settings.lr,
        lr_scheduler_type="linear",
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip_grad_norm,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = pq.read_table(settings.train, columns=["prompt", "ground_truth"]).to_pydict()
    return GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=exact_match,
        args=config,
        train_dataset=Dataset.from_dict(rows),
        callbacks=[callback],
    )


def exact_match(completions: list[str], ground_truth: list[str], **columns: Any) -> list[float | None]:
    """Return one reward per completion: 1.0 if it equals the ground truth of its prompt, else 0.0."""
    return [float(text == truth) for text, truth in zip(completions, ground_truth, strict=True)]


def _parse(arguments: list[str] | None) -> TrlSettings:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl_baseline", description=__doc__)
    for field in fields(TrlSettings):
        required = field.name in ("model", "train", "held_out")
        kind = {"str": str, "int": int, "float": float}[str(field.type)]
        default = None if required else field.default
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, required=required, default=default)
    return TrlSettings(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    print(json.dumps(asdict(run(_parse(None)))))
