"""Reads the metrics in the folder of an earlier ``asyncrl train`` process.

A process that continues from a checkpoint copies the metrics of the steps before the checkpoint into its own folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from .estimates import Estimate, Evaluation
from .run_records import PREFIXES, StepRecord, json_object

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class History:
    """The metrics of the learner steps and evaluations up to a checkpoint, in order.

    Attributes:
        steps: Records of the learner steps that led to the checkpoint.
    """

    steps: Sequence[StepRecord] = ()
    evaluations: Sequence[Evaluation] = ()


def read_history(run_dir: Path, version: int) -> History:
    """Read the records of the steps and evaluations before a checkpoint of the policy version ``version``.

    Raises:
        ValueError: there are no metrics, or a line is not a record of this version of asyncrl.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} must hold the steps before the checkpoint, but is missing; restore the file")
    whole = read_records(run_dir)
    return History(
        steps=[record for record in whole.steps if record.step < version],
        evaluations=[evaluation for evaluation in whole.evaluations if evaluation.policy_version < version],
    )


def read_records(run_dir: Path) -> History:
    """Read the records of all steps and evaluations in a run's folder. A missing file is treated as empty.

    Raises:
        ValueError: a line is not a record of this version of asyncrl. The message names the line.
    """
    steps = run_dir / "metrics.jsonl", "step", "reward", "lag_mean", "equal_reward_groups"
    evaluations = run_dir / "evaluations.jsonl", "policy_version", "greedy", "estimates"
    return History(steps=[*_read(_step_record, *steps)], evaluations=[*_read(_evaluation, *evaluations)])


def _read(parse: Callable[[dict[str, Any]], _T], path: Path, *keys: str) -> Iterator[_T]:
    whole, _, _ = (path.read_text(errors="replace") if path.is_file() else "").rpartition("\n")
    for number, line in enumerate(whole.splitlines(), start=1):
        place = f"line {number} of {path}"
        try:
            yield parse(json_object(line, place, *keys))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{place} must be a record of this version of asyncrl, but reading it fails with {error!r}; use the "
                "version of asyncrl that wrote the file"
            ) from error


def _step_record(numbers: Mapping[str, Any]) -> StepRecord:
    names = {one.name for one in fields(StepRecord)}
    parts: dict[str, Any] = {"metrics": {}, "episodes": {}, "learner": {}}
    own: dict[str, Any] = {}
    for name, value in numbers.items():
        if name in names:
            own[name] = value
        elif part := next((part for part in PREFIXES if name.startswith(f"{PREFIXES[part]}.")), ""):
            parts[part][name.removeprefix(f"{PREFIXES[part]}.")] = value
        else:
            parts["metrics"][name] = value
    return StepRecord(**(own | parts))


def _evaluation(values: Mapping[str, Any]) -> Evaluation:
    def estimates(found: Mapping[str, Any]) -> dict[str, Estimate]:
        return {name: Estimate(**one) for name, one in found.items()}

    by_source = {source: estimates(found) for source, found in values["by_source"].items()}
    return Evaluation(**{**values, "estimates": estimates(values["estimates"]), "by_source": by_source})


def history_folder(checkpoint: Path, saved_in: str) -> Path:
    """Return the run folder with the metrics of the ``asyncrl train`` process that saved a checkpoint.

    The result is the folder that contains ``checkpoint`` (two levels up), if this folder has metrics. Otherwise the
    result is ``saved_in``, the run folder that the checkpoint names.
    """
    holds = checkpoint.resolve().parent.parent
    return holds if (holds / "metrics.jsonl").is_file() else Path(saved_in)
