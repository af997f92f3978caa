"""Sends the metrics of a run to trackers: Weights & Biases, MLflow and Prometheus.

If a tracker fails, the failure is logged and counted, and training continues. A tracker's package is imported when the
tracker is opened. ``configs/grafana.json`` is a dashboard for the metrics that Prometheus reads.
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
from .run_records import RunUse, StepRecord

logger = logging.getLogger(__name__)

_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "prometheus": "prometheus_client"}
_MAX_PARAMETERS = 100
_MAX_PARAMETER_LENGTH = 500
TRACKERS = tuple(_PACKAGES)
_LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_PUBLISH_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

Event = StepRecord | Evaluation | RunUse
"""What trackers record: the metrics of a learner step, an evaluation, or how busy learner and fleet have been."""


class Tracker(Protocol):
    """Receives the metrics of a run. Only `close` waits for a network.

    Attributes:
        place: Text that says where the user finds the run's metrics. Example: a URL.
    """

    place: str

    def record(self, event: Event) -> None:
        """Send the numbers of an event: a learner step, an evaluation, or how busy learner and fleet are (`RunUse`)."""
        ...

    def go_on(self, event: Event) -> None:
        """Receive an event of an earlier ``asyncrl train`` process, from the steps before the resumed checkpoint.

        W&B and MLflow send the event, as `record` does. Prometheus only notes the totals of the event, because its
        counters begin at 0.
        """
        ...

    def close(self) -> None:
        """Send the remaining metrics, and mark the run as ended in the tracker."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Information about a run that a tracker gets when the tracker is opened.

    Attributes:
        experiment: Name of the experiment or project in the tracker.
        folder: Folder of the run; its name is the run's name in the tracker.
        options: The run's configuration, as nested dicts.
        prometheus_address: ``host:port`` at which Prometheus reads the metrics.
    """

    experiment: str
    folder: Path
    options: Mapping[str, Any]
    prometheus_address: str


def check_trackers(names: Sequence[str]) -> None:
    """Check that the names of trackers are known, and that the Python package of each tracker is installed.

    Raises:
        ValueError: a name is unknown, or a package is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"tracker must be a list of names from {list(TRACKERS)}, got {name!r}")
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ValueError(
                f"tracker={name} needs the package {_PACKAGES[name]}, which is not installed; install it with "
                f"pip install 'asyncrl[{name}]', or remove {name} from tracker"
            )


class Trackers:
    """All trackers of a run. A failed call is logged and counted.

    Attributes:
        num_failed: Number of failed calls of each tracker, by its name.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self.num_failed = dict.fromkeys(trackers, 0)

    @classmethod
    def open(cls, names: Sequence[str], run: TrackedRun) -> Trackers:
        """Open the trackers with the given names. If a tracker cannot be opened, close the others.

        Raises:
            ValueError: a name is unknown, a package is not installed, or a tracker cannot be opened. The message names
                the tracker.
        """
        check_trackers(names)
        opened = cls({})
        for name in dict.fromkeys(names):
            try:
                opened._trackers[name] = _KINDS[name](run)
            except Exception as error:
                opened.close()
                raise ValueError(
                    f"tracker={name} cannot be opened: {error}; remove {name} from tracker to train without it"
                ) from error
            opened.num_failed[name] = 0
        return opened

    @property
    def lines(self) -> list[str]:
        """One line of text per tracker, with the address at which the tracker shows the run."""
        return [f"tracker {name}: {tracker.place}" for name, tracker in self._trackers.items()]

    def record(self, event: Event) -> None:
        """Send an event to all trackers. A tracker's error is logged and counted, not raised."""
        self._each(lambda tracker: tracker.record(event))

    def go_on(self, events: Sequence[Event]) -> None:
        """Send the events of the run's earlier processes to all trackers."""
        for event in events:
            self._each(lambda tracker, event=event: tracker.go_on(event))

    def close(self) -> None:
        """Send the remaining metrics to all trackers, and mark the run as ended there."""
        self._each(lambda tracker: tracker.close())
        self._trackers = {}

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - an error of a third-party package must not end training
                self.num_failed[name] += 1
                logger.warning("tracker %s failed (%d failures so far): %s", name, self.num_failed[name], error)


def numbers_of(event: Event) -> dict[str, float]:
    """Return a dict from metric name to number for an event. Example of a name: ``use/fleet/publish_pause``.

    The names have slashes, as in TensorBoard. A number whose name begins with ``use`` is a fraction, from 0 to 1, of
    the time since the start of training.
    """
    if isinstance(event, StepRecord):
        return {name.replace(".", "/"): value for name, value in event.flat().items()}
    if isinstance(event, Evaluation):
        numbers = {name: value for name, value in asdict(event).items() if isinstance(value, int | float)}
        return {f"evaluation/{name}": value for name, value in numbers.items() if name != "policy_version"}
    shares = {}
    for pool in (event.learner, event.fleet):
        total_s = pool.busy_s + sum(pool.idle_s.values()) or 1.0
        shares |= {f"use/{pool.name}/{cause}": idle_s / total_s for cause, idle_s in pool.idle_s.items()}
        shares[f"use/{pool.name}/busy"] = pool.utilisation
    return shares


class WandbTracker:
    """Sends metrics to Weights & Biases, configured by its environment variables.

    With ``WANDB_MODE=offline``, the tracker writes into the run's folder. The x axis of plots is ``step`` for learner
    steps, and ``policy_version`` for evaluations.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - an optional package

        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=run.experiment, name=run.folder.name, dir=run.folder, config=dict(run.options), reinit="create_new"
        )
        self._step = 0
        self.place = self._run.url or f"offline, in {self._run.dir}"
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("evaluation/*", step_metric="policy_version")

    def record(self, event: Event) -> None:
        """Send the numbers of an event to Weights & Biases."""
        self._step = event.step if isinstance(event, StepRecord) else self._step
        axis = {"policy_version": event.policy_version} if isinstance(event, Evaluation) else {"step": self._step}
        self._run.log(numbers_of(event) | axis)

    go_on = record

    def close(self) -> None:
        """Send the remaining metrics to Weights & Biases, and mark the run as ended there."""
        self._run.finish()
        self._teardown()  # end the service process of wandb


class MlflowTracker:
    """Sends metrics to MLflow at ``MLFLOW_TRACKING_URI``; without this variable, to a database in the run's folder.

    The tracker omits values that are not finite, because some stores of MLflow refuse them.
    """

    def __init__(self, run: TrackedRun) -> None:
        import mlflow  # pyright: ignore[reportMissingImports] - an optional package
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
        self._step = 0

    def record(self, event: Event) -> None:
        """Start to send the numbers of an event to MLflow. Raise the error of an earlier failed send."""
        self._step = event.step if isinstance(event, StepRecord) else self._step
        at, now_ms = event.policy_version if isinstance(event, Evaluation) else self._step, int(1000 * time.time())
        numbers = {name: value for name, value in numbers_of(event).items() if math.isfinite(value)}
        metrics = [self._metric(name, value, now_ms, at) for name, value in numbers.items()]
        self._pending.append(self._client.log_batch(self._run_id, metrics=metrics, synchronous=False))
        while self._pending and all(future.done() for future in self._pending[0]._operation_futures):
            self._pending.pop(0).wait()

    go_on = record

    def close(self) -> None:
        """Wait until all metrics are sent, and end the MLflow run. Raise the error of a failed send."""
        try:
            while self._pending:
                self._pending.pop(0).wait()
        finally:
            self._client.set_terminated(self._run_id)


class PrometheusTracker:
    """Serves the metrics at ``http://ADDRESS/metrics`` without a password. With port 0, the system chooses a port.

    Counters begin at 0 in each ``asyncrl train`` process, as Prometheus expects after a restart.

    Raises:
        ValueError: the address is invalid or not available.
    """

    def __init__(self, address: str, experiment: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self.registry = CollectorRegistry()
        self._last: dict[tuple[Any, ...], float] = {}
        self._make(experiment)
        host, port = split_address(address, "prometheus_address")
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ValueError(
                f"prometheus_address={address} must be free: {error.strerror}; choose another address"
            ) from error
        self.port: int = self._server.server_port
        self.place = f"http://{in_url(host)}:{self.port}/metrics"

    def _make(self, experiment: str) -> None:
        from prometheus_client import Counter, Gauge, Histogram, Info

        def make(kind: Any, name: str, meaning: str, labels: Sequence[str] = (), **own: Any) -> Any:
            return kind(f"asyncrl_{name}", meaning, labels, registry=self.registry, **own)

        make(Info, "run", "The run").info({"experiment": experiment})
        self._idle = make(
            Counter, "idle_seconds", "Idle seconds of a pool's ranks or sample slots, by cause", ["pool", "cause"]
        )
        self._busy = make(Counter, "busy_seconds", "Seconds of work of a pool's ranks or sample slots", ["pool"])
        self._capacity = make(Gauge, "capacity", "Ranks of the learner, sample slots of the fleet", ["pool"])
        self._groups = make(Gauge, "groups", "Prompt groups by state", ["state"])
        self._dropped_groups = make(Gauge, "dropped_groups", "Dropped prompt groups over all lives", ["reason"])
        self._dropped_tokens = make(Gauge, "dropped_tokens", "Dropped policy tokens over all lives", ["reason"])
        self._lag = make(Histogram, "lag", "Lag of trained groups, learner steps", buckets=_LAGS)
        meaning = "The last weight publish at each step, slowest engine"
        self._publish = make(Histogram, "publish_seconds", meaning, buckets=_PUBLISH_S)
        self._tokens = make(Counter, "tokens", "Policy tokens: generated, trained", ["kind"])
        self._plan_wait = make(Counter, "plan_wait_seconds", "Seconds that the controller waited for batches")
        self._update = make(Counter, "update_seconds", "Seconds of updates on the slowest rank")
        self._failed = make(Counter, "failed_groups", "Attempts that failed")
        self._version = make(Gauge, "policy_version", "Policy version, of learner and oldest engine", ["pool"])
        self._reward = make(Gauge, "reward", "Mean reward of the last batch")
        self._evaluation = make(Gauge, "evaluation", "Held-out mean reward", ["decoding"])
        self._evaluated = make(Gauge, "evaluation_version", "Policy version of the last evaluation")
        self._numbers = make(Gauge, "step_metric", "Numbers of the last step, as in metrics.jsonl", ["name"])

    def record(self, event: Event) -> None:
        """Update the metrics that Prometheus reads: set the counters and gauges to the numbers of ``event``."""
        if isinstance(event, StepRecord):
            self._record_step(event)
        elif isinstance(event, Evaluation):
            self._evaluation.labels("sampled").set(event.sampled)
            self._evaluation.labels("greedy").set(event.greedy)
            self._evaluated.set(event.policy_version)
        else:
            for pool in (event.learner, event.fleet):
                self._capacity.labels(pool.name).set(pool.capacity)
                self._raise(self._busy, pool.busy_s, pool.name)
                for cause, idle_s in pool.idle_s.items():
                    self._raise(self._idle, idle_s, pool.name, cause)

    def go_on(self, event: Event) -> None:
        """Note the totals of the run's earlier processes, so that the counters of this process exclude them."""
        if isinstance(event, StepRecord):
            self._last[id(self._failed),] = event.failed_groups
            self._last[id(self._tokens), "generated"] = event.generated_tokens

    def _record_step(self, record: StepRecord) -> None:
        self._reward.set(record.reward)
        self._version.labels("learner").set(record.step + 1)
        self._version.labels("engines").set(record.engine_version)
        for state, count in record.groups.items():
            self._groups.labels(state).set(count)
        for gauge, counts in (
            (self._dropped_groups, record.groups_dropped_by_reason),
            (self._dropped_tokens, record.tokens_dropped_by_reason),
        ):
            for reason, count in counts.items():
                gauge.labels(reason).set(count)
        for lag, count in record.lags.items():
            for _ in range(count):
                self._lag.observe(lag)
        self._publish.observe(record.publish_s)
        self._plan_wait.inc(record.plan_wait_s)
        self._update.inc(record.update_s)
        self._raise(self._failed, record.failed_groups)
        self._raise(self._tokens, record.generated_tokens, "generated")
        self._tokens.labels("trained").inc(round(record.learner_tokens_per_s * record.update_s))
        for name, value in record.flat().items():
            self._numbers.labels(name).set(value)

    def close(self) -> None:
        """Stop the HTTP server that serves the metrics."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _raise(self, counter: Any, value: float, *labels: str) -> None:
        """Increase a Prometheus counter by the growth of its total since the previous call; ``value`` is the total."""
        key = (id(counter), *labels)
        rise = value - self._last.get(key, 0.0)
        child = counter.labels(*labels) if labels else counter
        if rise > 0:
            self._last[key] = value
            child.inc(rise)


_KINDS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "prometheus": lambda run: PrometheusTracker(run.prometheus_address, run.experiment),
}


def _leaves(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def split_address(address: str, option: str) -> tuple[str, int]:
    """Split ``host:port`` into host and port. The brackets around an IPv6 host are removed.

    Raises `ValueError`, which names ``option``, if the address has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{option} must be HOST:PORT, got {address!r}; example: 127.0.0.1:0 (any free port)")
    return host.strip("[]"), int(port)


def in_url(host: str) -> str:
    """Return ``host`` in the form that URLs need: with brackets around an IPv6 address, else unchanged."""
    return f"[{host}]" if ":" in host else host
