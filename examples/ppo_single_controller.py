"""Synchronous PPO in the form of a verl driver: one process calls groups of workers, one group after the other.

Four Ray workers form a mesh of dp × sp = 2 × 2. Each worker holds an actor with a rollout engine, a reference and a
critic. Each data-parallel rank has an SGLang server, which loads weights as in an asynchronous run. Run it with::

    python -m examples.ppo_single_controller total_steps=20

Every argument is an option of ``asyncrl train``. Generation and training do not overlap, which they do in
``asyncrl train``.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoTokenizer

from asyncrl import single_controller as sc
from asyncrl.cli.compose import compose_run
from asyncrl.cli.preflight import read_prompts
from asyncrl.cli.quickstart import with_quickstart_assets
from asyncrl.config import RunConfig
from asyncrl.core.host import own_python
from asyncrl.core.types import Prompt
from asyncrl.sft.warm_start import warm_start
from asyncrl.single_controller import DataProto, Role
from examples.actor_rollout_ref_worker import ActorRolloutRefWorker
from learner import AlgorithmConfig, CriticWorker
from learner.advantages import generalized_advantages, standardized
from rollout_fleet.rewards import Reward, exact_match

OPTIONS = ["experiment=ppo", "learner.num_ranks=4", "learner.sp_size=2", "learner.offload_at_transition_only=true"]
OPTIONS += ["learner.critic.warmup_steps=0"]


class PPOTrainer:
    """The driver. The driver has the prompts, computes rewards and advantages, and calls one worker group at a time."""

    def __init__(self, run: RunConfig, model_path: str, folder: str, reward: Reward = exact_match) -> None:
        self.run, self.reward = run, reward
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.prompts, self.held_out = read_prompts(run)
        roles = {"actor_rollout": Role.ActorRollout, "ref": Role.RefPolicy, "critic": Role.Critic}
        layout = sc.ResourcePoolManager(
            {"global_pool": [run.learner.num_ranks]},
            dict.fromkeys(roles.values(), "global_pool"),
            use_gpu=run.learner.device == "cuda",
        )
        layout.create_resource_pool()
        worker = {"model_path": model_path, "folder": folder}
        critic = {"model_path": model_path, "total_steps": run.total_steps}
        classes = {
            "actor_rollout": sc.RayClassWithInitArgs(ActorRolloutRefWorker, run, "actor_rollout", **worker),
            "ref": sc.RayClassWithInitArgs(ActorRolloutRefWorker, run, "ref", **worker),
            "critic": sc.RayClassWithInitArgs(CriticWorker, run.learner, run.algorithm, **critic),
        }
        fused = sc.create_colocated_worker_cls(classes)
        self.workers = sc.RayWorkerGroup(layout.get_resource_pool(Role.ActorRollout), fused, timeout_s=600)
        self.groups = self.workers.spawn(classes)
        self.on_all("init_model")

    def stop(self) -> None:
        self.on_all("stop")
        self.workers.shutdown()

    def on_all(self, method: str, *arguments: Any) -> None:
        for group in self.groups.values():
            group.execute_all_sync(method, *arguments)

    def fit(self, on_step: Callable[[int, dict[str, float]], None]) -> None:
        """Train for ``total_steps`` steps. ``on_step`` is called with the number and the metrics of each step.

        After the last step, ``on_step`` is called once more with the final ``greedy_reward``.
        """
        actor, ref, critic = (self.groups[role] for role in ("actor_rollout", "ref", "critic"))
        algorithm, num_samples = self.run.algorithm, self.run.algorithm.samples_per_prompt
        for step in range(self.run.total_steps + 1):
            self.on_all("rollout_mode", step)
            metrics = {"greedy_reward": self.generated(self.held_out, do_sample=False).batch["scores"].mean().item()}
            if step == self.run.total_steps:
                return on_step(step, metrics)
            prompts = self.prompts.take(algorithm.groups_per_step)
            batch = self.generated([prompt for prompt in prompts for _ in range(num_samples)], do_sample=True)
            self.on_all("trainer_mode")
            batch = batch.union(actor.compute_log_prob(batch))
            batch = batch.union(ref.compute_ref_log_prob(batch))
            batch = batch.union(critic.compute_values(batch))
            add_advantages(batch, algorithm)
            results = [critic.update_critic(batch), actor.update_actor(batch)]
            metrics |= {name: values[0] for result in results for name, values in result.meta_info["metrics"].items()}
            on_step(step, metrics | {"reward": batch.batch["scores"].mean().item()})

    def generated(self, prompts: list[Prompt], *, do_sample: bool) -> DataProto:
        """Generate one response for each prompt; return a batch with the responses and the rewards ``scores`` [B].

        If ``do_sample`` is False, the engine always takes the most probable token.
        """
        width = self.run.data.max_prompt_tokens
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.prompt_ids) :] = torch.tensor(prompt.prompt_ids)
            mask[row, width - len(prompt.prompt_ids) :] = 1
        batch = DataProto.from_dict({"input_ids": ids, "attention_mask": mask}, meta_info={"do_sample": do_sample})
        batch = self.groups["actor_rollout"].generate_sequences(batch)
        texts = self.tokenizer.batch_decode(batch.batch["responses"], skip_special_tokens=True)
        batch.batch["scores"] = torch.tensor([self.reward(*pair) for pair in zip(prompts, texts, strict=True)])
        return batch


def add_advantages(batch: DataProto, algorithm: AlgorithmConfig) -> None:
    """Add the columns ``advantages`` and ``returns`` [B, R] to ``batch``, computed with GAE.

    The reward of each token is minus its KL penalty. The last token of a response also gets the score of the response.
    """
    columns, mask = batch.batch, batch.batch["response_mask"].bool()
    rewards = algorithm.kl_reward_coef * (columns["ref_log_prob"] - columns["old_log_probs"])
    rewards[torch.arange(len(mask)), mask.sum(1) - 1] += columns["scores"]
    gae = {"gamma": algorithm.gamma, "gae_lambda": algorithm.gae_lambda}
    advantages, returns = generalized_advantages(rewards[mask], columns["values"][mask], mask.sum(1), **gae)
    for name, values in (("advantages", standardized(advantages, lambda total: total)), ("returns", returns)):
        columns[name] = torch.zeros(mask.shape).masked_scatter(mask, values.float())


def main(overrides: list[str]) -> None:
    """Warm-start the quickstart's policy on demonstrations, then train it with PPO.

    ``overrides`` are options of the run, such as ``total_steps=20``.
    """
    overrides = [*OPTIONS, *overrides]
    run = with_quickstart_assets(compose_run(overrides))
    folder = Path(run.output_dir, "ppo_single_controller", time.strftime("%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    policy = asyncio.run(warm_start(run, overrides, folder / "sft.log", print))
    ray.init("local", num_cpus=run.learner.num_ranks, include_dashboard=False, runtime_env=own_python())
    trainer = PPOTrainer(run, str(policy), str(folder))
    trainer.fit(lambda step, metrics: print(f"step {step}: {metrics}", flush=True))
    trainer.stop()


if __name__ == "__main__":
    print(__doc__) if {"-h", "--help"} & set(sys.argv) else main(sys.argv[1:])
