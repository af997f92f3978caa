"""Trackers of a run's metrics: Weights & Biases, MLflow and Prometheus.

The option ``tracker`` names them; each gets all steps and evaluations. A failing tracker causes a warning and is
counted, and training continues. A tracker's package is imported when the tracker is opened.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from .estimates import Evaluation
from .prometheus import PrometheusTracker
from .records import RunUse, StepRecord

logger = logging.getLogger(__name__)

_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "prometheus": "prometheus_client"}
_MAX_PARAMETERS = 100
_MAX_PARAMETER_LENGTH = 500
TRACKERS = tuple(_PACKAGES)


class Tracker(Protocol):
    """Receives the metrics of a run. No call waits for a network.

    Attributes:
        place: Where the user finds the run in the tracker.
    """

    place: str

    def step(self, record: StepRecord) -> None:
        """Record a finished learner step."""
        ...

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record a held-out evaluation."""
        ...

    def use(self, use: RunUse) -> None:
        """Record the use of the pools since the start of training."""
        ...

    def close(self) -> None:
        """Send the remaining metrics and end the tracked run."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Description of a run for its trackers.

    Attributes:
        experiment: Name of the experiment, and of the tracker's project or experiment.
        folder: Folder of the run; its name is the run's name in the tracker.
        options: The resolved configuration, nested.
        prometheus_address: ``host:port`` of ``/metrics``.
    """

    experiment: str
    folder: Path
    options: Mapping[str, Any]
    prometheus_address: str


def check_trackers(names: Sequence[str]) -> None:
    """Check that the names are known and that each tracker's package is installed.

    Raises:
        ValueError: an unknown name, or a package that is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"tracker must name some of {list(TRACKERS)}, got {name!r}")
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ValueError(
                f"tracker={name} needs the package {_PACKAGES[name]}, which is not installed; install it with "
                f"pip install 'asyncrl[{name}]', or leave it out of tracker"
            )


class Trackers:
    """All trackers of a run.

    Attributes:
        num_failed: Number of failed calls by tracker.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self.num_failed = dict.fromkeys(trackers, 0)

    @classmethod
    def open(cls, names: Sequence[str], run: TrackedRun) -> Trackers:
        """Open trackers by name. If one fails, the others are closed.

        Raises:
            ValueError: as `check_trackers`, or a tracker cannot be opened; the message names it.
        """
        check_trackers(names)
        opened = cls({})
        for name in dict.fromkeys(names):
            try:
                opened._trackers[name] = _KINDS[name](run)
            except Exception as error:
                opened.close()
                raise ValueError(f"tracker={name} cannot be opened: {error}; fix the cause, or leave it out") from error
            opened.num_failed[name] = 0
        return opened

    @property
    def lines(self) -> list[str]:
        """One line per tracker with its place."""
        return [f"tracker {name}: {tracker.place}" for name, tracker in self._trackers.items()]

    def step(self, record: StepRecord) -> None:
        """Record a finished learner step."""
        self._each(lambda tracker: tracker.step(record))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record a held-out evaluation."""
        self._each(lambda tracker: tracker.evaluation(evaluation))

    def use(self, use: RunUse) -> None:
        """Record the use of the pools."""
        self._each(lambda tracker: tracker.use(use))

    def close(self) -> None:
        """Send the remaining metrics and end the tracked run."""
        self._each(lambda tracker: tracker.close())
        self._trackers = {}

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - an error of a foreign package must not end training
                self.num_failed[name] += 1
                logger.warning("tracker %s failed (%d failures so far): %s", name, self.num_failed[name], error)


class WandbTracker:
    """Weights & Biases, configured by its environment variables; ``WANDB_MODE=offline`` writes into the run's folder.

    The x axis is ``step`` for steps and ``policy_version`` for evaluations, since both arrive in any order.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=run.experiment, name=run.folder.name, dir=run.folder, config=dict(run.options), reinit="create_new"
        )
        self._num_steps = 0
        self.place = self._run.url or f"offline, in {self._run.dir}"
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("evaluation/*", step_metric="policy_version")

    def step(self, record: StepRecord) -> None:
        """Record a finished learner step."""
        self._num_steps = record.step
        self._run.log(_numbers(record))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record a held-out evaluation."""
        self._run.log(_evaluation_numbers(evaluation) | {"policy_version": evaluation.policy_version})

    def use(self, use: RunUse) -> None:
        """Record the use of the pools."""
        self._run.log(_use_numbers(use) | {"step": self._num_steps})

    def close(self) -> None:
        """Send the remaining metrics and end the tracked run."""
        self._run.finish()
        self._teardown()  # else its service process would outlive the run


class MlflowTracker:
    """MLflow at ``MLFLOW_TRACKING_URI``; without that variable, a database in the run's folder.

    MLflow sends in a background thread. Values that are not finite are left out, because its stores refuse some.
    """

    def __init__(self, run: TrackedRun) -> None:
        import mlflow  # pyright: ignore[reportMissingImports] - an extra
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric = Metric
        uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else f"sqlite:///{run.folder / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(run.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(run.experiment)
        self._run_id = self._client.create_run(experiment, run_name=run.folder.name).info.run_id
        options = [Param(name, str(value)[:_MAX_PARAMETER_LENGTH]) for name, value in _leaves(run.options)]
        for first in range(0, len(options), _MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=options[first : first + _MAX_PARAMETERS])
        self.place = f"run {self._run_id} at {uri}"
        self._pending: list[Any] = []
        self._num_steps = 0

    def step(self, record: StepRecord) -> None:
        """Record a finished learner step."""
        self._num_steps = record.step
        self._log(_numbers(record), record.step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record a held-out evaluation."""
        self._log(_evaluation_numbers(evaluation), evaluation.policy_version)

    def use(self, use: RunUse) -> None:
        """Record the use of the pools."""
        self._log(_use_numbers(use), self._num_steps)

    def close(self) -> None:
        """Wait until all metrics are sent; raise the error of a failed send."""
        try:
            self._settle(all_of_it=True)
        finally:
            self._client.set_terminated(self._run_id)

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        now_ms = int(1000 * time.time())
        metrics = [self._metric(name, value, now_ms, step) for name, value in numbers.items() if math.isfinite(value)]
        self._pending.append(self._client.log_batch(self._run_id, metrics=metrics, synchronous=False))
        self._settle(all_of_it=False)

    def _settle(self, *, all_of_it: bool) -> None:
        """Raise the error of a failed send; with ``all_of_it``, wait for all sends."""
        while self._pending and (all_of_it or all(future.done() for future in self._pending[0]._operation_futures)):
            self._pending.pop(0).wait()


_KINDS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "prometheus": lambda run: PrometheusTracker(run.prometheus_address, run.experiment),
}


def _numbers(record: StepRecord) -> dict[str, float]:
    """The metrics of a step under TensorBoard's names, with slashes."""
    return {name.replace(".", "/"): value for name, value in record.flat().items()}


def _evaluation_numbers(evaluation: Evaluation) -> dict[str, float]:
    return {
        f"evaluation/{name}": value
        for name, value in asdict(evaluation).items()
        if isinstance(value, int | float) and name != "policy_version"
    }


def _use_numbers(use: RunUse) -> dict[str, float]:
    """Shares of each pool's time since the start of training. Example of a name: ``use/fleet/publish_pause``."""
    numbers = {}
    for pool in (use.learner, use.fleet):
        total_s = pool.busy_s + sum(pool.idle_s.values()) or 1.0
        numbers |= {f"use/{pool.name}/{cause}": idle_s / total_s for cause, idle_s in pool.idle_s.items()}
        numbers[f"use/{pool.name}/busy"] = pool.utilisation
    return numbers


def _leaves(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
