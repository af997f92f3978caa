"""The files that a run sends to other nodes and collects from them."""

import asyncio
import shutil
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from asyncrl.config import ModelConfig, RunConfig, WeightsConfig
from asyncrl.core.errors import AsyncRLError
from asyncrl.run import node_folders, run_folder
from asyncrl.run.node_folders import NodeFiles, NodeFolders
from asyncrl.weights.carriers import Transport
from buffer import make_keys


class Node:
    """Stands in for the Ray actor on a node. The node's files are under ``root``.

    If ``root`` is None, the node uses the file system of this process.
    """

    def __init__(self, root=None):
        self.root = root
        self.error = None

    def __getattr__(self, method):
        async def call(*args):
            if self.error is not None:
                raise self.error
            return getattr(NodeFiles(), method)(*map(self.there, args))

        return SimpleNamespace(remote=call)

    def there(self, value):
        if isinstance(value, list):
            return [self.there(item) for item in value]
        is_path = isinstance(value, str) and value.startswith("/")
        return f"{self.root}{value}" if is_path and self.root else value

    def file(self, path):
        return self.root / str(path)[1:]


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Yield two nodes. The first node uses the file system of this process, the second node has its own folder."""
    monkeypatch.setattr(node_folders.ray, "put", lambda data: data)
    monkeypatch.setattr(run_folder, "SHARED_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(node_folders, "CHUNK_BYTES", 7)
    return {"10.0.0.1": Node(), "10.0.0.2": Node(tmp_path / "other")}


class LateNodes:
    """Makes a `Node` for each node that joins later. The node's address ends with the last digit of its id."""

    def __init__(self, folder):
        self.folder, self.made = folder, []

    def __call__(self, node_id):
        self.made.append(node_id)
        return f"10.0.0.{node_id[-1]}", self.at(node_id)

    def at(self, node_id):
        return Node(self.folder / node_id)


@pytest.fixture
def late_nodes(tmp_path):
    return LateNodes(tmp_path)


@pytest.fixture
async def folders(tmp_path, nodes, late_nodes):
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    folders = NodeFolders(run_dir, nodes, timeout_s=5.0, make=late_nodes)
    await folders.open()
    return folders


def make_model(folder, text="weights of twenty bytes"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "empty.txt").touch()
    (folder / "model.safetensors").write_text(text)
    return folder


async def test_only_nodes_that_do_not_see_the_run_folder_get_a_separate_folder(folders):
    assert folders.apart == ["10.0.0.2"]


async def test_a_model_that_every_node_has_is_not_copied(folders, nodes, tmp_path):
    model = make_model(tmp_path / "model")
    make_model(nodes["10.0.0.2"].file(model))
    assert await folders.bring(model, "model") == model


@pytest.mark.parametrize("text_there", [None, "weights of twenty BYTES"])
async def test_a_model_that_is_missing_or_different_on_a_node_is_copied_to_the_run_folder(
    folders, nodes, tmp_path, text_there
):
    model = make_model(tmp_path / "model")
    if text_there:
        make_model(nodes["10.0.0.2"].file(model), text_there)
    for _ in range(2):  # restarted ranks request the model's folder a second time
        path = await folders.bring(model, "model")
    assert path == tmp_path / "run" / "model"
    there = nodes["10.0.0.2"].file(path)
    assert {file.name: file.read_text() for file in there.iterdir()} == {f.name: f.read_text() for f in model.iterdir()}
    assert (path / "model.safetensors").read_text() == "weights of twenty bytes"


async def test_a_node_gets_only_the_keys_of_its_roles_and_only_their_owner_can_read_them(folders, nodes, tmp_path):
    make_keys(tmp_path / "run" / "keys")
    config = RunConfig()
    assert (await folders.supply(config, keys=str(tmp_path / "run" / "keys"), resumes=False)) == config
    there = nodes["10.0.0.2"].file(tmp_path / "run" / "keys")
    assert sorted(path.name for path in there.iterdir()) == ["learner.json", "rollout.json", "store.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in there.iterdir()} == {0o600}
    assert stat.S_IMODE(there.stat().st_mode) == 0o700


async def test_a_folder_that_a_node_does_not_share_is_named_together_with_the_node(folders, tmp_path):
    with pytest.raises(ValueError, match=r"weights.directory must be on a file system .* which 10.0.0.2 cannot see"):
        await folders.check_shared("weights.directory", tmp_path / "weights")
    assert not list((tmp_path / "weights").iterdir())


async def test_growing_logs_and_complete_samples_are_copied_from_a_node(folders, nodes, tmp_path):
    run_dir, there = tmp_path / "run", nodes["10.0.0.2"].file(tmp_path / "run")
    (there / "logs").mkdir(parents=True)
    (there / "samples").mkdir()
    (there / "logs" / "rollout-1.log").write_text("one\n")
    (there / "samples" / ".train.parquet.partial").write_text("ha")
    await folders.collect()
    with (there / "logs" / "rollout-1.log").open("a") as log:
        log.write("two, which is longer\n")
    (there / "samples" / ".train.parquet.partial").rename(there / "samples" / "train.parquet")
    await folders.collect()
    await folders.collect()
    assert (run_dir / "logs" / "rollout-1.log").read_text() == "one\ntwo, which is longer\n"
    assert [path.read_text() for path in (run_dir / "samples").iterdir()] == ["ha"]


async def test_a_copied_log_with_an_existing_name_gets_another_name(folders, nodes, tmp_path):
    logs = nodes["10.0.0.2"].file(tmp_path / "run" / "logs")
    logs.mkdir(parents=True)
    (tmp_path / "run" / "logs" / "rollout-0.log").write_text("before it moved\n")
    for text in ("there\n", "there\nand on\n"):
        (logs / "rollout-0.log").write_text(text)
        await folders.collect()
    logs = tmp_path / "run" / "logs"
    assert (logs / "rollout-0.log").read_text() == "before it moved\n"
    assert (logs / "rollout-0-2.log").read_text() == "there\nand on\n"


async def test_a_policy_is_copied_from_another_node_and_the_end_removes_the_nodes_files(folders, nodes, tmp_path):
    policy = make_model(nodes["10.0.0.2"].file(tmp_path / "run" / "policy"))
    await folders.fetch(tmp_path / "run" / "policy")
    assert (tmp_path / "run" / "policy" / "model.safetensors").read_text() == "weights of twenty bytes"
    await folders.close()
    assert not policy.parent.exists()
    assert (tmp_path / "run" / "policy").is_dir()


async def test_other_runs_do_not_remove_a_nodes_shared_memory_before_the_end_of_the_run(
    folders, nodes, tmp_path, monkeypatch
):
    memories = [tmp_path / "memory", nodes["10.0.0.2"].file(tmp_path / "memory")]
    for memory in memories:
        monkeypatch.setattr(run_folder, "SHARED_MEMORY", memory)
        assert len(list(memory.iterdir())) == 1
        assert run_folder.sweep_shared_memory() == []
    monkeypatch.setattr(run_folder, "SHARED_MEMORY", memories[0])
    await folders.close()
    assert not [left for memory in memories for left in memory.iterdir()], "shared memory must be empty on every node"


async def test_a_run_ends_even_if_a_node_does_not_answer(folders, nodes, caplog):
    nodes["10.0.0.2"].error = AsyncRLError("its node died")
    await folders.close()
    assert "node 10.0.0.2 still has files of the run, in [" in caplog.text
    await folders.collect()
    assert "logs and samples of node 10.0.0.2 cannot be copied: its node died" in caplog.text


async def test_a_path_that_a_node_cannot_create_is_refused_with_the_reason(folders, nodes, tmp_path):
    shutil.rmtree(nodes["10.0.0.2"].root)
    nodes["10.0.0.2"].root.write_text("a file where its folders should be")
    with pytest.raises(ValueError, match=r"every node must have a folder .*run/model, .*10.0.0.2: Not a directory"):
        await folders.bring(make_model(tmp_path / "model"), "model")


async def test_a_run_on_one_node_copies_nothing(tmp_path):
    alone = NodeFolders(tmp_path, {}, timeout_s=1.0)
    config = RunConfig()
    assert await alone.supply(config, keys="", resumes=True) is config
    assert await alone.bring(tmp_path / "policy", "start") == tmp_path / "policy"
    await alone.close()


async def test_a_node_that_joins_later_gets_the_model_and_the_keys(folders, nodes, late_nodes, tmp_path):
    model, keys = make_model(tmp_path / "model"), tmp_path / "run" / "keys"
    make_keys(keys)
    make_model(nodes["10.0.0.2"].file(model))
    config = replace(RunConfig(), model=ModelConfig(path=str(model)))
    assert (await folders.supply(config, keys=str(keys), resumes=False)).model.path == str(model)
    late = late_nodes.at("c3")
    first, second = await asyncio.gather(folders.admit("c3"), folders.admit("c3"))
    assert first == second == str(tmp_path / "run" / "model")
    assert (late.file(first) / "model.safetensors").read_text() == "weights of twenty bytes"
    assert "rollout.json" in {path.name for path in late.file(keys).iterdir()}
    assert (late_nodes.made, folders.apart) == (["c3"], ["10.0.0.2", "10.0.0.3"])


async def test_a_replaced_node_with_the_same_address_gets_the_model_again(folders, nodes, late_nodes, tmp_path):
    model = make_model(tmp_path / "model")
    config = replace(RunConfig(), model=ModelConfig(path=str(model)))
    path = (await folders.supply(config, keys="", resumes=False)).model.path
    nodes["10.0.0.2"].error = RayActorError()
    await folders.collect()
    assert folders.apart == []
    back = late_nodes.at("b2")
    assert await folders.admit("b2") == path
    assert (back.file(path) / "config.json").read_text() == "{}"


async def test_a_node_without_room_for_the_weights_in_shared_memory_is_named(folders, tmp_path, monkeypatch):
    model = make_model(tmp_path / "model")
    weights = WeightsConfig(transport=Transport.collective)
    config = replace(RunConfig(), model=ModelConfig(path=str(model)), weights=weights)
    assert (await folders.supply(config, keys="", resumes=False)).weights == weights
    usage = shutil.disk_usage(tmp_path)
    full = usage._replace(free=2 * (model / "model.safetensors").stat().st_size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full if "other" in str(path) else usage)
    with pytest.raises(ValueError, match=r"got: 10\.0\.0\.2 has 0 MiB; .*weights\.transport=file"):
        await folders.supply(config, keys="", resumes=False)
    await folders.supply(replace(config, weights=WeightsConfig()), keys="", resumes=False)  # no room is needed


async def test_a_late_node_that_does_not_see_a_shared_folder_is_not_used(folders, late_nodes, tmp_path):
    weights = WeightsConfig(transport=Transport.file, directory=str(tmp_path / "weights"))
    alone = NodeFolders(tmp_path / "run", {}, timeout_s=1.0, known=["own"], make=late_nodes)
    await alone.supply(replace(RunConfig(), weights=weights), keys="", resumes=False)
    with pytest.raises(ValueError, match=r"weights.directory must be on a file system .* which 10.0.0.3 cannot see"):
        await alone.admit("c3")
    assert await alone.admit("own") == ""
