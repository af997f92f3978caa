"""A run on several nodes: checks that its options are valid, and that its processes fit on the nodes."""

from dataclasses import fields

import pytest

from asyncrl.checks import check_options
from asyncrl.config import PlacementConfig, RayConfig, RunConfig, Strategy
from asyncrl.run.cluster import check_nodes, engine_pool, node_shares, pool_of_one, worker_env
from asyncrl.weights.carriers import Transport
from learner.config import Device
from rollout_fleet.config import EngineDevice, SGLangConfig

FILE = {"transport": Transport.file, "directory": "/mnt/weights"}
COLLECTIVE = {"transport": Transport.collective, "interface": "eth0"}


def config_of(**sections):
    """Return the configuration of a run on two nodes. ``sections`` maps a section to the options that it replaces."""
    several = {"placement": {"num_nodes": 2}, "ray": {"address": "auto"}, "buffer": {"host": "10.0.0.1"}}
    kinds = {section.name: section.default_factory for section in fields(RunConfig)}
    names = several.keys() | sections.keys()
    return RunConfig(**{name: kinds[name](**(several.get(name, {}) | sections.get(name, {}))) for name in names})


@pytest.mark.parametrize("weights", [FILE, COLLECTIVE])
def test_a_run_on_several_nodes_with_shared_weights_is_accepted(weights):
    check_options(config_of(weights=weights))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"ray": {"address": ""}}, "ray.address must be auto, or host:port of a Ray cluster of all nodes"),
        ({"buffer": {"host": "127.0.0.1"}}, "buffer.host must be an address or interface that the other nodes"),
        ({"buffer": {"host": "lo"}}, "buffer.host must be an address or interface"),
        ({"weights": {"transport": Transport.shared_memory}}, "must be file or collective .*, got shared_memory"),
        ({"weights": {}}, "weights.transport must be file or collective with placement.num_nodes=2, got auto"),
        ({"weights": {"transport": Transport.file}}, "weights.directory must be a folder that all nodes share"),
        ({"weights": {"transport": Transport.collective}}, "weights.interface must be one that all nodes reach"),
        ({"weights": FILE, "placement": {"num_nodes": 2, "colocated": True}}, "placement.colocated must be false"),
        (
            {"weights": FILE, "placement": {"num_nodes": 2, "ranks_per_node": 2}, "learner": {"num_ranks": 3}},
            "placement.ranks_per_node must be a divisor of the processes of each pool",
        ),
    ],
)
def test_options_that_do_not_fit_several_nodes_are_refused_by_name(sections, words):
    with pytest.raises(ValueError, match=words):
        check_options(config_of(**sections))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"placement": {"num_nodes": 2, "autoscale": True}},
            r"num_engines must be \{min: N, max: M\} .*got 1: a f",
        ),
        (
            {"placement": {"num_nodes": 1, "autoscale": True}, "rollout_fleet": {"num_engines": {"min": 1, "max": 2}}},
            "placement.num_nodes must be > 1 with placement.autoscale=true, got 1: the run would not use",
        ),
    ],
)
def test_autoscale_is_refused_if_the_run_could_not_use_more_nodes(sections, words):
    with pytest.raises(ValueError, match=words):
        check_options(config_of(weights=FILE, **sections))


def test_only_the_engines_that_a_run_starts_with_must_fit_the_nodes():
    config = config_of(weights=FILE, rollout_fleet={"num_engines": {"min": 1, "max": 9}})
    check_nodes(config, {"10.0.0.1": {"CPU": 1.0}, "10.0.0.2": {"CPU": 1.0}})
    assert engine_pool(config).store == [1]


def test_a_joining_engine_is_placed_on_the_requested_node_or_on_a_node_that_is_not_full():
    config = on_gpus(engine_labels={"pool": "inference"}, engines_per_node=2)
    pool = pool_of_one(config, node_id="", full={"b", "a"})
    assert (pool.store, pool.bundle()) == ([1], {"CPU": 1.0, "GPU": 2.0})
    assert pool.labels == {"pool": "inference", "ray.io/node-id": "!in(a,b)"}
    assert pool_of_one(config, node_id="c", full={"a"}).labels["ray.io/node-id"] == "c"


def test_options_for_several_nodes_are_refused_on_one_node():
    several = {"ranks_per_node": 2, "engines_per_node": 1, "strategy": Strategy.spread, "engine_labels": {"gpu": "a"}}
    for name, value in several.items():
        with pytest.raises(ValueError, match=rf"placement.{name}=.* needs several nodes"):
            PlacementConfig(**{name: value})
    with pytest.raises(ValueError, match=r"ray\.node_address=10\.0\.0\.1 is only for .* joins"):
        RayConfig(node_address="10.0.0.1")


def on_gpus(**placement):
    """Return a run on two nodes with eight learner ranks, and four engines of two GPUs each."""
    return config_of(
        weights=COLLECTIVE,
        learner={"device": Device.cuda, "num_ranks": 8},
        rollout_fleet={"device": EngineDevice.cuda, "num_engines": 4, "sglang": SGLangConfig(tp_size=2)},
        placement={"num_nodes": 2, **placement},
    )


def test_node_shares_are_resources_that_must_be_on_the_same_node():
    config = on_gpus(ranks_per_node=4, engines_per_node=3, cpus_per_engine=4.0)
    ranks, engines = {"CPU": 4.0, "GPU": 4.0}, {"CPU": 12.0, "GPU": 6.0}
    assert node_shares(config) == [ranks, ranks, engines, {"CPU": 4.0, "GPU": 2.0}]
    assert node_shares(on_gpus()) == [{"CPU": 8.0, "GPU": 8.0}, *[{"CPU": 1.0, "GPU": 2.0}] * 4]


def test_each_node_must_have_room_and_not_only_all_nodes_together():
    node = {"CPU": 64.0, "GPU": 8.0}
    check_nodes(on_gpus(), {"10.0.0.1": node, "10.0.0.2": node})
    with pytest.raises(ValueError, match=r"placement.num_nodes=2 nodes must be in the cluster .*, got 1 \(10.0.0.1\)"):
        check_nodes(on_gpus(), {"10.0.0.1": {"CPU": 64.0, "GPU": 16.0}})
    halves = {f"10.0.0.{number}": {"CPU": 32.0, "GPU": 4.0} for number in range(4)}
    with pytest.raises(ValueError, match=r"such ranks or engines needs .*'GPU': 8.0.*lower placement.ranks_per_node"):
        check_nodes(on_gpus(), halves)
    check_nodes(on_gpus(ranks_per_node=4), halves)
    with pytest.raises(ValueError, match="asks for 16 GPUs"):
        check_nodes(on_gpus(), {"10.0.0.1": node, "10.0.0.2": {"CPU": 64.0}})


def test_engines_get_the_gpus_of_their_tensor_parallel_ranks_on_one_node():
    pool = engine_pool(on_gpus())
    assert (pool.store, pool.bundle(), pool.strategy) == ([4], {"CPU": 1.0, "GPU": 2.0}, "PACK")
    assert not pool.apart
    spread = engine_pool(on_gpus(strategy=Strategy.spread, engine_labels={"pool": "inference"}))
    assert (spread.strategy, spread.labels) == ("SPREAD", {"pool": "inference"})
    by_node = engine_pool(on_gpus(strategy=Strategy.spread, engines_per_node=3))
    assert (by_node.store, by_node.strategy, by_node.apart) == ([3, 1], "STRICT_PACK", True)


def test_collectives_of_the_ranks_use_the_configured_interface():
    assert worker_env(on_gpus(interface="ib0"))["NCCL_SOCKET_IFNAME"] == "ib0"
    assert "GLOO_SOCKET_IFNAME" not in worker_env(on_gpus())
