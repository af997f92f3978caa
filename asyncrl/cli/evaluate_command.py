"""``asyncrl evaluate MODEL_OR_RUN``: evaluate a policy on held-out prompts with one engine.

The policy is a model in Hugging Face layout, a checkpoint, or the policy of a run. The command starts no Ray cluster,
no buffer server and no learner.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyncrl.checks import check_model
from asyncrl.cli.compose import compose_run, dump_yaml, read_config
from asyncrl.cli.preflight import check_folder, check_own_functions, check_vocabulary, try_reward
from asyncrl.cli.quickstart import with_quickstart_assets
from asyncrl.config import RunConfig, episode_context, has_environment, with_time_to_read
from asyncrl.core.errors import AsyncRLError, with_exit_status
from asyncrl.core.image_files import image_reader
from asyncrl.core.types import AnsweredPrompt, Prompt
from asyncrl.data.prompts import load_eval_prompts
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.metrics import Evaluation, read_json, write_json
from asyncrl.run.evaluator import HeldOutEvaluator
from asyncrl.run.run_folder import RunPaths
from learner.checkpoint_folder import newest_checkpoint, read_progress
from rollout_fleet.answering import AnsweringParts
from rollout_fleet.config import EngineKind
from rollout_fleet.engines import check_engine_installed
from rollout_fleet.evaluation import HeldOutAnswers

_USAGE = """\
usage: asyncrl evaluate MODEL_OR_RUN [experiment=NAME|FILE.yaml] [OPTION=VALUE ...]

Evaluates a policy on data.eval_files: mean@k and pass@k with 95% intervals, and the greedy answers. MODEL_OR_RUN is

  a model in Hugging Face layout; the options come from the experiment and from OPTION=VALUE
  a run, or an experiment's folder (its newest run): its policy/, else its newest checkpoint, with the run's options
  a checkpoint, or a folder of checkpoints (the newest): with the options of its run, else as for a model

Relevant options: data.eval_files, data.eval_max_prompts, evaluation.num_samples, evaluation.pass_reward,
rollout_fleet.engine, rollout_fleet.reward, rollout_fleet.sampling.*; asyncrl train --help-all explains them.

Results, in evaluations/TIME/ of the run, or in <output_dir>/evaluations/MODEL/TIME/: evaluation.json, samples/
(asyncrl samples DIR shows them), config.yaml, logs/.
"""


@dataclass(frozen=True, kw_only=True)
class EvaluatedPolicy:
    """The policy to evaluate.

    Attributes:
        model: Folder of the model in Hugging Face layout. If None, the policy is in ``checkpoint``, and the command
            exports it to such a folder.
        version: Policy version (the number of learner steps that made the policy); 0 if it is unknown.
    """

    model: Path | None = None
    checkpoint: Path | None = None
    run_dir: Path | None = None
    version: int = 0


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl evaluate`` and return the exit status: 1 if some prompts have no answer."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(_USAGE)
        return 0
    if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        raise ValueError("asyncrl evaluate needs MODEL_OR_RUN as its first argument; --help explains it")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        policy = find_policy(Path(arguments[0]).expanduser().resolve())
        if policy.checkpoint is not None and policy.run_dir is None:
            sys.stderr.write(
                f"{policy.checkpoint} is not in a run's folder, so the options come from this command line; to use the "
                "options of its run, name the run's folder\n"
            )
        with tempfile.TemporaryDirectory(prefix="asyncrl-") as own:
            overrides = list(arguments[1:])
            if policy.run_dir is not None:  # begin with the options of the run; the command line may override them
                experiment = Path(own, "evaluated_run.yaml")
                experiment.write_text("# @package _global_\n" + (policy.run_dir / "config.yaml").read_text())
                overrides = [f"experiment={experiment}", *overrides]
            config = with_quickstart_assets(compose_run(overrides))
        folder = _make_folder(policy, config)
        with _as_model(policy, folder) as model:
            config = replace(config, model=replace(config.model, path=str(model)))
            evaluation = asyncio.run(_until_done_or_stopped(config, folder, policy.version))
    except (KeyboardInterrupt, asyncio.CancelledError) as end:
        number = signal.SIGINT if isinstance(end, KeyboardInterrupt) else signal.SIGTERM
        sys.stderr.write(f"stopped by {number.name}\n")
        return 128 + number
    write_json(folder / "evaluation.json", asdict(evaluation))
    _show(evaluation, folder)
    return 1 if evaluation.num_missing else 0


def find_policy(path: Path) -> EvaluatedPolicy:
    """Find the policy at ``path``. The path is a model, a checkpoint, or the folder of a run.

    Raises:
        ValueError: there is no policy at the path, or the run has options of another release.
    """
    if (path / "config.json").is_file():
        run_dir = path.parent if path.name == "policy" and (path.parent / "config.yaml").is_file() else None
        return EvaluatedPolicy(model=path, run_dir=run_dir, version=_version_of(run_dir))
    runs = [path] if (path / "config.yaml").is_file() else sorted(path.glob("*/config.yaml"), reverse=True)
    looked_in: list[Path] = []
    for run_dir in (run if run.is_dir() else run.parent for run in runs):
        if (run_dir / "policy" / "config.json").is_file():
            return EvaluatedPolicy(model=run_dir / "policy", run_dir=run_dir, version=_version_of(run_dir))
        looked_in.append(RunPaths.checkpoints_of(read_config(run_dir), run_dir))
        if checkpoint := newest_checkpoint(looked_in[-1]):
            return EvaluatedPolicy(checkpoint=checkpoint, run_dir=run_dir, version=read_progress(checkpoint).version)
    if path.is_dir() and (checkpoint := newest_checkpoint(path)):
        near = [folder for folder in checkpoint.parents[:2] if (folder / "config.yaml").is_file()]
        version = read_progress(checkpoint).version
        return EvaluatedPolicy(checkpoint=checkpoint, run_dir=next(iter(near), None), version=version)
    expected = f" (the run's checkpoints would be in {looked_in[0]})" if looked_in else ""
    raise ValueError(
        f"asyncrl evaluate: {path} must hold a model (config.json), a checkpoint, or a run with one of them, got "
        f"none{expected}; check the path"
    )


def _version_of(run_dir: Path | None) -> int:
    summary = read_json(run_dir / "summary.json", "policy_version") if run_dir is not None else None
    return summary["policy_version"] if summary is not None else 0


def _make_folder(policy: EvaluatedPolicy, config: RunConfig) -> Path:
    name = (policy.model or policy.checkpoint or Path("policy")).name
    base = policy.run_dir or Path(config.output_dir).resolve()
    folder = base / "evaluations" / (name if policy.run_dir is None else "") / time.strftime("%Y-%m-%d_%H-%M-%S")
    check_folder("output_dir", str(folder))
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_yaml(config))
    return folder


@contextmanager
def _as_model(policy: EvaluatedPolicy, folder: Path) -> Iterator[Path]:
    if policy.checkpoint is None:
        assert policy.model is not None
        yield policy.model
        return
    from learner.checkpoint import export  # import here, because the module loads torch

    with tempfile.TemporaryDirectory(prefix=".policy-", dir=folder) as exported:
        export(policy.checkpoint, Path(exported, "policy"))
        yield Path(exported, "policy")


async def _until_done_or_stopped(config: RunConfig, folder: Path, version: int) -> Evaluation:
    work = asyncio.ensure_future(evaluate(config, folder, version))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    return await work


async def evaluate(config: RunConfig, folder: Path, version: int) -> Evaluation:
    """Evaluate the model ``model.path`` on the held-out prompts, with one engine. Returns the result.

    ``version`` is the policy version of the model's weights. This number is only stored in the result. Logs and samples
    are written to ``folder``.

    Raises:
        ValueError: an option or a file is wrong. The message names the option or the file.
        AsyncRLError: the engine failed, or the answers to all prompts have no reward.
    """
    prompts = _held_out_prompts(config)
    check_engine_installed(config.rollout_fleet)
    check_own_functions(config)
    await try_reward(config, prompts[0])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = with_time_to_read(config)
    parts = AnsweringParts.of(
        config.rollout_fleet,
        model_path=config.model.path,
        log_dir=str(folder / "logs"),
        seed=config.seed,
        episode_context=episode_context(config),
        sample_dir=str(folder / "samples"),
    )
    try:
        await parts.start()
        fleet = OneEngine(HeldOutAnswers(parts, sampling=config.rollout_fleet.sampling_for))
        evaluator = HeldOutEvaluator(config, fleet=fleet, prompts=prompts)
        evaluation = await evaluator.evaluate_all(parts.engine.version)
    finally:
        await parts.close()
    if evaluation is None:
        reason = fleet.failure or "the reward or the environment failed on each; the warnings above have the errors"
        raise AsyncRLError(f"no answer to any of the {len(prompts)} prompts has a reward: {reason}")
    return replace(evaluation, policy_version=version)


def _held_out_prompts(config: RunConfig) -> list[Prompt]:
    check_model(config)
    if not config.data.eval_files:
        raise ValueError("data.eval_files must name at least one parquet or jsonl file, got none; set this option")
    if config.rollout_fleet.engine is EngineKind.scripted:
        raise ValueError("rollout_fleet.engine must be sglang or transformers, got scripted, which is for tests")
    tokenizer = load_tokenizer(config.model.path, chat_template=config.data.chat_template)
    check_vocabulary(config, tokenizer)
    images = image_reader(config.model.path, max_pixels=config.rollout_fleet.max_image_pixels)
    prompts = load_eval_prompts(config.data, tokenizer, has_environment=has_environment(config), images=images)
    if not prompts:
        raise ValueError(f"data.eval_files={config.data.eval_files} must hold prompts, got none")
    return prompts


class OneEngine:
    """One engine in this process, with the interface of a fleet of engines.

    Attributes:
        failure: The latest error that the engine raised; None if the engine raised no error.
    """

    def __init__(self, answers: HeldOutAnswers) -> None:
        self.failure: AsyncRLError | None = None
        self._answers = answers

    def engines(self) -> list[str]:
        """Return a list with one entry, the name of the engine."""
        return ["0"]

    async def answer(
        self, engine: str, prompts: Sequence[Prompt], *, version: int, num_samples: int
    ) -> list[AnsweredPrompt]:
        """Sample and score answers to prompts. Returns one object per answered prompt.

        If the engine fails, this method stores the error in ``failure``, and raises it.
        """
        del engine
        try:
            return await self._answers.answer(prompts, version=version, num_samples=num_samples)
        except AsyncRLError as error:
            self.failure = error
            raise


def _show(evaluation: Evaluation, folder: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("mean", "95% from", "to"):
        table.add_column(name, justify="right")
    for source, estimates in {"": evaluation.estimates, **evaluation.by_source}.items():
        for name, one in estimates.items():
            table.add_row(f"{source} {name}".strip(), f"{one.mean:.3f}", f"{one.low:.3f}", f"{one.high:.3f}")
    console.print(table)
    console.print(
        f"policy version {evaluation.policy_version}, {evaluation.num_prompts} prompts, "
        f"{evaluation.response_length:.1f} tokens per answer, {evaluation.truncated:.1%} truncated, "
        f"{evaluation.took_s:.1f} s{evaluation.shortfall}",
        markup=False,
    )
    console.print(f"in {folder}", markup=False)
