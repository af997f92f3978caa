"""``/metrics`` for Prometheus, under the names that ``configs/grafana.json`` uses.

A thread of ``prometheus_client`` serves the page; each learner step updates the values.
"""

from __future__ import annotations

from typing import Any

from .estimates import Evaluation
from .records import RunUse, StepRecord

_LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_PUBLISH_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class PrometheusTracker:
    """Serves ``http://ADDRESS/metrics``.

    Args:
        address: ``host:port``; with port 0 the system chooses ``port``. The page has no password.
        experiment: Name of the experiment, for ``asyncrl_run_info``.

    Attributes:
        registry: The collectors of the page.
        port: The port.
        place: The URL.

    Raises:
        ValueError: the address is invalid or not available.
    """

    def __init__(self, address: str, experiment: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self.registry = CollectorRegistry()
        self._last: dict[tuple[Any, ...], float] = {}
        self._make_pipeline()
        self._make_policy(experiment)
        host, port = split_address(address, "prometheus_address")
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ValueError(
                f"prometheus_address={address} must be free: {error.strerror}; choose another one"
            ) from error
        self.port: int = self._server.server_port
        self.place = f"http://{in_url(host)}:{self.port}/metrics"

    def _make_pipeline(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        own: dict[str, Any] = {"registry": self.registry}
        self._idle = Counter(
            "asyncrl_idle_seconds", "Idle seconds of a pool's ranks or places, by cause", ["pool", "cause"], **own
        )
        self._busy = Counter("asyncrl_busy_seconds", "Seconds of work of a pool's ranks or places", ["pool"], **own)
        self._capacity = Gauge("asyncrl_capacity", "Ranks of the learner, places of the fleet", ["pool"], **own)
        self._groups = Gauge("asyncrl_groups", "Prompt groups by state", ["state"], **own)
        self._lag = Histogram("asyncrl_lag", "Lag of trained groups, learner steps", buckets=_LAGS, **own)
        self._publish = Histogram(
            "asyncrl_publish_seconds",
            "The last weight publish at each step, slowest engine",
            buckets=_PUBLISH_S,
            **own,
        )
        self._tokens = Counter("asyncrl_tokens", "Policy tokens: generated, trained", ["kind"], **own)
        self._plan_wait = Counter("asyncrl_plan_wait_seconds", "Seconds that the controller waited for batches", **own)
        self._update = Counter("asyncrl_update_seconds", "Seconds of updates on the slowest rank", **own)
        self._failed = Counter("asyncrl_failed_groups", "Attempts that failed", **own)

    def _make_policy(self, experiment: str) -> None:
        from prometheus_client import Gauge, Info

        own: dict[str, Any] = {"registry": self.registry}
        Info("asyncrl_run", "The run", **own).info({"experiment": experiment})
        self._version = Gauge("asyncrl_policy_version", "Policy version, of learner and oldest engine", ["pool"], **own)
        self._reward = Gauge("asyncrl_reward", "Mean reward of the last batch", **own)
        self._evaluation = Gauge("asyncrl_evaluation", "Held-out mean reward", ["decoding"], **own)
        self._evaluated = Gauge("asyncrl_evaluation_version", "Policy version of the last evaluation", **own)
        self._numbers = Gauge("asyncrl_step_metric", "Numbers of the last step, as in metrics.jsonl", ["name"], **own)

    def step(self, record: StepRecord) -> None:
        """Record a finished learner step."""
        self._reward.set(record.reward)
        self._version.labels("learner").set(record.step + 1)
        self._version.labels("engines").set(record.engine_version)
        for state, count in record.groups.items():
            self._groups.labels(state).set(count)
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

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record a held-out evaluation."""
        self._evaluation.labels("sampled").set(evaluation.sampled)
        self._evaluation.labels("greedy").set(evaluation.greedy)
        self._evaluated.set(evaluation.policy_version)

    def use(self, use: RunUse) -> None:
        """Record the use of the pools."""
        for pool in (use.learner, use.fleet):
            self._capacity.labels(pool.name).set(pool.capacity)
            self._raise(self._busy, pool.busy_s, pool.name)
            for cause, idle_s in pool.idle_s.items():
                self._raise(self._idle, idle_s, pool.name, cause)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _raise(self, counter: Any, value: float, *labels: str) -> None:
        """Raise a counter to a total. A total may fall during an open step; then the counter keeps its value."""
        key = (id(counter), *labels)
        rise = value - self._last.get(key, 0.0)
        child = counter.labels(*labels) if labels else counter
        if rise > 0:
            self._last[key] = value
            child.inc(rise)


def split_address(address: str, option: str) -> tuple[str, int]:
    """Split ``host:port``; an IPv6 host has brackets. Raises `ValueError` that names the option."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{option} must be HOST:PORT, got {address!r}; 127.0.0.1:0 is loopback on any free port")
    return host.strip("[]"), int(port)


def in_url(host: str) -> str:
    """A host for a URL: brackets around an IPv6 address."""
    return f"[{host}]" if ":" in host else host
