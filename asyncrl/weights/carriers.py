"""The carriers (the ways to bring weights to the engines), and the check that the options suit the run's carrier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from asyncrl.core.types import Carrier, OfferKind

Backend = Literal["gloo", "nccl"]
SLOWEST_LOAD = 1e8
"""Slowest expected transfer, in bytes per second. Deadlines grow by the size of the weights divided by this speed."""
HOST_WINDOW_S = 0.5
ENGINE_WINDOW_S = 0.1
ENGINE_SHARE = 0.4
"""Fraction of a load's deadline that one round (transfer) to engines may take. So a second round is possible."""
_ALL_KINDS: frozenset[OfferKind] = frozenset({"full", "delta", "adapter"})


def load_limit_s(timeout_s: float, num_bytes: int) -> float:
    """Return the time limit of a transfer, in seconds: ``timeout_s`` plus one second per 100 MB."""
    return timeout_s + num_bytes / SLOWEST_LOAD


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Options for a learner that publishes policy versions.

    Attributes:
        carrier: How the bytes reach the engines.
        full_every: Every ``full_every``-th version is published in full. The other versions are differences from the
            previous version (deltas).
        adapters: If the model has adapters, publish the adapters alone. The frozen weights are published once, with the
            first version.
        timeout_s: Time limit of a transfer, in seconds; one second per 100 MB is added.
        num_held: Number of newest versions that each learner rank keeps in memory, if ranks send over the network.
        interface: Network interface on which engines reach the learner ranks. Only engines on the learner's host reach
            ``lo``.
        num_receivers: A round (transfer) starts as soon as this number of receivers have requested a version. It starts
            with fewer receivers at the end of `window_s`.
        backend: ``gloo`` sends between the memories of hosts. ``nccl`` sends between GPUs, and needs one GPU per
            process.
    """

    carrier: Carrier = Carrier.folder
    full_every: int = 1
    adapters: bool = False
    timeout_s: float = 120.0
    num_held: int = 2
    interface: str = "lo"
    num_receivers: int = 1
    backend: Backend = "gloo"

    @property
    def into_engines(self) -> bool:
        """True if each tensor-parallel rank of an engine receives the weights, instead of one worker per host.

        If True, engines pause during a round (one transfer of a version).
        """
        return self.carrier == Carrier.engine_stream

    @property
    def window_s(self) -> float:
        """Seconds that a round (one transfer of a version) waits for more receivers after the first request."""
        return ENGINE_WINDOW_S if self.into_engines else HOST_WINDOW_S

    def round_timeout_s(self, num_bytes: int) -> float:
        """Return the time limit, in seconds, of a round (one transfer of a version) that sends ``num_bytes`` bytes."""
        return load_limit_s(self.timeout_s, num_bytes) * (ENGINE_SHARE if self.into_engines else 1.0)


class Transport(StrEnum):
    """Values of the option ``weights.transport``: how published weights reach the engines."""

    auto = "auto"
    shared_memory = "shared_memory"
    file = "file"
    collective = "collective"
    tensor = "tensor"  # `asyncrl.config.WeightsConfig` refuses the transport ``tensor``, because it was removed


class CollectiveInto(StrEnum):
    """Who receives the weights that the learner broadcasts: the engines' hosts, or the engines themselves."""

    host = "host"
    engine = "engine"


@dataclass(frozen=True, kw_only=True)
class CarrierRules:
    """A carrier (way to bring weights to engines), the options that choose it, and its capabilities.

    Attributes:
        transport: The value of ``weights.transport`` that chooses the carrier.
        collective_into: With ``collective``, the value of ``weights.collective_into`` that chooses the carrier.
        is_remote: Whether the carrier reaches engines on other hosts.
        between_gpus: Whether the carrier sends from GPU to GPU if each learner rank and each engine has its own GPU.
        kinds: Kinds of versions that the carrier supports: full, delta, adapter.
        keeps_all: Whether the learner can keep all versions (``learner.keep_snapshots=-1``).
        uses: Names of carrier-specific options that have an effect with this carrier.
        needs: Options of ``uses`` that a run on several hosts must set, each with a description of its value.
    """

    transport: Transport
    collective_into: CollectiveInto = CollectiveInto.host
    carrier: Carrier
    is_remote: bool = False
    between_gpus: bool = False
    kinds: frozenset[OfferKind] = _ALL_KINDS
    keeps_all: bool = False
    uses: frozenset[str] = frozenset()
    needs: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The values of the options that choose the carrier, for messages. Example: ``file``."""
        into_engines = self.collective_into is CollectiveInto.engine
        return f"{self.transport}, collective_into=engine" if into_engines else self.transport

    def backend(self, *, own_gpus: bool) -> Backend:
        """Return the backend of the transfers.

        ``own_gpus`` is True if learner ranks and engines have GPUs, and no two processes share a GPU.
        """
        return "nccl" if self.between_gpus and own_gpus else "gloo"


_INTERFACE = {"weights.interface": "one that all nodes reach"}
CARRIERS: dict[tuple[Transport, CollectiveInto], CarrierRules] = {
    (rules.transport, rules.collective_into): rules
    for rules in (
        CarrierRules(transport=Transport.auto, carrier=Carrier.folder, keeps_all=True),
        CarrierRules(transport=Transport.shared_memory, carrier=Carrier.folder),
        CarrierRules(
            transport=Transport.file,
            carrier=Carrier.folder,
            is_remote=True,
            keeps_all=True,
            uses=frozenset({"weights.directory", "weights.copy_to_memory"}),
            needs={"weights.directory": "a folder that all nodes share"},
        ),
        CarrierRules(
            transport=Transport.collective,
            carrier=Carrier.host_stream,
            is_remote=True,
            uses=frozenset({"weights.interface", "weights.collective_into"}),
            needs=_INTERFACE,
        ),
        CarrierRules(
            transport=Transport.collective,
            collective_into=CollectiveInto.engine,
            carrier=Carrier.engine_stream,
            is_remote=True,
            between_gpus=True,
            kinds=frozenset({"full"}),
            uses=frozenset({"weights.interface", "weights.collective_into"}),
            needs=_INTERFACE,
        ),
    )
}
"""The rules of each carrier. Keys: the values of ``weights.transport`` and ``weights.collective_into``.

With another transport than ``collective``, the second value is `CollectiveInto.host`."""


@dataclass(frozen=True, kw_only=True)
class CarrierUse:
    """A run's requirements for its carrier (the way to bring weights to engines).

    Attributes:
        full_every: Every ``full_every``-th version is published in full. The other versions are deltas.
        adapters: Whether adapters are published without the frozen weights.
        keeps_all: Whether the learner keeps all versions (``learner.keep_snapshots=-1``).
        given: Values of the carrier-specific options that do not have the default value, by name of the option.
    """

    full_every: int
    adapters: bool
    num_hosts: int
    keeps_all: bool
    given: Mapping[str, object]


def check_carrier(rules: CarrierRules, use: CarrierUse) -> None:
    """Check that a carrier (a way to bring weights to engines) supports the settings of a run.

    Raises `ValueError` if the carrier does not support a setting, or if settings contradict each other. The message
    names the option and the remedy.
    """
    for fault in _faults(rules, use):
        raise ValueError(fault)


def _faults(rules: CarrierRules, use: CarrierUse) -> Iterator[str]:
    for option, value in use.given.items():
        if option not in rules.uses:
            user = next(f"weights.transport={other.name}" for other in CARRIERS.values() if option in other.uses)
            yield f"{option}={value} is used by {user}, got {rules.name}; set {user}, or leave {option} out"
    chosen = f"weights.transport={rules.name}"
    for kind, is_wanted, fault in (
        (
            "delta",
            use.full_every > 1,
            f"weights.full_every must be 1 with {chosen}, got {use.full_every}: a delta",
        ),
        ("adapter", use.adapters, f"weights.adapters must be false with {chosen}, got true: an adapter"),
    ):
        if is_wanted and kind not in rules.kinds:
            yield (
                f"{fault} needs weights on the engine's host, and the host does not store any; set this, or another "
                "transport"
            )
    if use.full_every > 1 and use.adapters:
        yield (
            f"weights.full_every must be 1 where adapters are published alone, got {use.full_every}: adapters are "
            "already small; set 1, or weights.adapters=false to publish merged weights"
        )
    if use.keeps_all and not rules.keeps_all:
        yield (
            f"weights.transport must be file to keep all versions (learner.keep_snapshots=-1), got {rules.name}; set "
            "file, or keep fewer versions"
        )
    where = f"with placement.num_nodes={use.num_hosts}"
    if use.num_hosts > 1 and not rules.is_remote:
        yield f"weights.transport must be file or collective {where}, got {rules.name}"
    for option in rules.needs if use.num_hosts > 1 else ():
        if option not in use.given:
            yield f"{option} must be {rules.needs[option]} {where}, got its default"
