"""Where a run's numbers go besides its folder: Weights & Biases, MLflow, and Prometheus, which asks for them.

Each is opened by its name in ``tracker``, and told of every step and evaluation. A tracker that fails costs a warning
and is counted; training goes on. Packages are imported when a tracker is opened.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """Takes a run's numbers. No call waits for a network.

    Attributes:
        place: Where the run is to be seen there.
    """

    place: str

    def step(self, record: StepRecord) -> None:
        """Take a finished learner step."""
        ...

    def evaluation(self, evaluation: Evaluation) -> None:
        """Take a held-out evaluation."""
        ...

    def use(self, use: RunUse) -> None:
        """Take how the pools are used, since training began."""
        ...

    def close(self) -> None:
        """Send what is left, and end the run there."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run when it begins.

    Attributes:
        experiment: Its name; a project or an experiment there.
        folder: Of the run; its name becomes the run's there.
        options: The resolved configuration, nested.
        prometheus_address: ``host:port`` that ``/metrics`` is served at.
    """

    experiment: str
    folder: Path
    options: Mapping[str, Any]
    prometheus_address: str


def check_trackers(names: Sequence[str]) -> None:
    """Check names, and that each tracker's package is there.

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
    """The trackers of a run, as one.

    Attributes:
        num_failed: Calls that failed, by tracker.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self.num_failed = dict.fromkeys(trackers, 0)

    @classmethod
    def open(cls, names: Sequence[str], run: TrackedRun) -> Trackers:
        """Open trackers by name, once each; those opened are closed again where a later one fails.

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
                raise ValueError(f"tracker={name} cannot be opened: {error}; mend it, or leave it out") from error
            opened.num_failed[name] = 0
        return opened

    @property
    def lines(self) -> list[str]:
        """What the user is told of them: where they are."""
        return [f"tracker {name}: {tracker.place}" for name, tracker in self._trackers.items()]

    def step(self, record: StepRecord) -> None:
        """See `Tracker.step`."""
        self._each(lambda tracker: tracker.step(record))

    def evaluation(self, evaluation: Evaluation) -> None:
        """See `Tracker.evaluation`."""
        self._each(lambda tracker: tracker.evaluation(evaluation))

    def use(self, use: RunUse) -> None:
        """See `Tracker.use`."""
        self._each(lambda tracker: tracker.use(use))

    def close(self) -> None:
        """See `Tracker.close`."""
        self._each(lambda tracker: tracker.close())
        self._trackers = {}

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            with self._counting(name):
                call(tracker)

    @contextmanager
    def _counting(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a foreign package raises, training is worth more
            self.num_failed[name] += 1
            logger.warning("tracker %s failed, for the %d. time: %s", name, self.num_failed[name], error)


class WandbTracker:
    """Weights & Biases; its environment variables say where to, ``WANDB_MODE=offline`` keeps the run in its folder.

    Steps have the x axis ``step``, evaluations ``policy_version``: both come when they are ready, in any order.
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
        """See `Tracker.step`."""
        self._num_steps = record.step
        self._run.log(_numbers(record))

    def evaluation(self, evaluation: Evaluation) -> None:
        """See `Tracker.evaluation`."""
        self._run.log(_evaluation_numbers(evaluation) | {"policy_version": evaluation.policy_version})

    def use(self, use: RunUse) -> None:
        """See `Tracker.use`."""
        self._run.log(_use_numbers(use) | {"step": self._num_steps})

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()
        self._teardown()  # its service process, which would outlive the run otherwise


class MlflowTracker:
    """MLflow; ``MLFLOW_TRACKING_URI`` says where to, and without it a folder of the run takes it.

    MLflow sends from a thread of its own. Numbers that are not finite are left out: its stores refuse some of them.
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
        """See `Tracker.step`."""
        self._num_steps = record.step
        self._log(_numbers(record), record.step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """See `Tracker.evaluation`."""
        self._log(_evaluation_numbers(evaluation), evaluation.policy_version)

    def use(self, use: RunUse) -> None:
        """See `Tracker.use`."""
        self._log(_use_numbers(use), self._num_steps)

    def close(self) -> None:
        """See `Tracker.close`. Raises what sending raised."""
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
        """Look at what was sent, so that a failure is raised, and wait for the rest of it where that is asked."""
        while self._pending and (all_of_it or all(future.done() for future in self._pending[0]._operation_futures)):
            self._pending.pop(0).wait()


_KINDS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "prometheus": lambda run: PrometheusTracker(run.prometheus_address, run.experiment),
}


def _numbers(record: StepRecord) -> dict[str, float]:
    """The numbers of a step under TensorBoard's names, a dot as a slash."""
    return {name.replace(".", "/"): value for name, value in record.flat().items()}


def _evaluation_numbers(evaluation: Evaluation) -> dict[str, float]:
    return {
        f"evaluation/{name}": value
        for name, value in asdict(evaluation).items()
        if isinstance(value, int | float) and name != "policy_version"
    }


def _use_numbers(use: RunUse) -> dict[str, float]:
    """Shares of each pool's time since training began. Example: ``use/fleet/publish pause``."""
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
