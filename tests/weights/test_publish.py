import asyncio
import json
import mmap
import os
import re
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.core.errors import WeightsError
from asyncrl.core.types import Carrier
from asyncrl.weights import publish as weights
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.layout import ModelLayout, Region
from asyncrl.weights.load import FileWeights, PublishedAdapter
from asyncrl.weights.manifest import device_digest_of, read_manifest
from asyncrl.weights.publish import WeightPublisher
from asyncrl.weights.snapshot import RankPart, WritableFile
from asyncrl.weights.staging import WeightStager
from asyncrl.weights.stream import receive_weights
from learner.config import AlgorithmConfig, Device, LearnerConfig, LoraConfig, OptimizerConfig
from learner.fsdp import local_tensor
from learner.lora import adapted_layers
from learner.losses import policy_objective
from learner.model_folder import save_policy
from learner.model_shards import PretrainedShards
from learner.trainer import Trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import TRAINED_FAMILIES, random_sequences, save_tiny_model
from tests.support.whole_weights import gather_weights, save_whole

pytestmark = pytest.mark.long

CONFIG = LearnerConfig(device=Device.cpu, optimizer=OptimizerConfig(lr=1e-2))
THREE_EXPERTS = "qwen3_moe with three experts"
"""Two ranks cannot divide three experts, so they divide the experts' second dimension."""
IN_BOTH_TYPES = ("qwen3", "qwen3_moe", "qwen3_next")


@pytest.fixture
def publisher_of():
    """Yield a function that makes publishers. The fixture closes the publishers after the test."""
    made = []

    def make(trainer, directory, keep=2, **options):
        made.append(WeightPublisher(PretrainedShards.of(trainer), str(directory), keep=keep, **options))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def saved(folder: Path, family: str) -> str:
    """Save a tiny model. Returns its path."""
    if family == THREE_EXPERTS:
        return save_tiny_model(folder / "model", "qwen3_moe", num_experts=3)
    return save_tiny_model(folder / "model", family)


def folder_of(offer) -> Path:
    return Path(read_manifest(offer).directory)


ROWS = [
    pytest.param(family, dtype, marks=() if dtype == "float32" or family in IN_BOTH_TYPES else pytest.mark.slow)
    for family in TRAINED_FAMILIES
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "dtype"), ROWS)
def test_published_weights_load_as_the_trained_model(family, dtype, tmp_path, publisher_of):
    if (family, dtype) == ("minimax", "bfloat16"):
        pytest.skip("Hugging Face's own forward raises")
    path = save_tiny_model(tmp_path / "model", family)
    trainer = Trainer(replace(CONFIG, dtype=dtype), model_path=path, total_updates=1)
    trainer.update(random_sequences(3), policy_objective(AlgorithmConfig()))
    offer = publisher_of(trainer, tmp_path / "published").publish(12).result()
    folder = folder_of(offer)
    assert (offer.version, folder.name) == (12, "v00000012")
    written = load_file(folder / "model.safetensors")
    original = load_file(f"{path}/model.safetensors")
    assert {k: v.shape for k, v in written.items()} == {k: v.shape for k, v in original.items()}
    buffers = dict(trainer.pretrained.named_buffers())
    assert {v.dtype for n, v in written.items() if n not in buffers} == {getattr(torch, dtype)}
    assert offer.num_bytes == sum(v.nbytes for v in written.values())
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    again = Trainer(CONFIG, model_path=str(folder), total_updates=1)
    for name, value in loaded.named_parameters():
        torch.testing.assert_close(again.pretrained.get_parameter(name), value)
    assert (written["model.embed_tokens.weight"].float() - original["model.embed_tokens.weight"]).abs().max() > 1e-3
    assert {name for name, _ in FileWeights(offer).tensors()} == written.keys()


def test_a_learner_on_a_gpu_publishes_digests_that_engines_compare_on_their_gpu(tmp_path, publisher_of, monkeypatch):
    path = save_tiny_model(tmp_path / "model", "qwen3")
    publisher = publisher_of(Trainer(CONFIG, model_path=path, total_updates=1), tmp_path / "published")
    assert {piece.device_digest for piece in read_manifest(publisher.publish(1).result()).pieces} == {None}
    monkeypatch.setattr(ModelLayout, "device", torch.device("cuda"))
    manifest = read_manifest(publisher.publish(2).result())
    data = np.fromfile(Path(manifest.directory, "model.safetensors"), dtype=np.uint8)
    for piece in manifest.pieces:
        assert piece.device_digest == device_digest_of(data[piece.start : piece.start + piece.num_bytes])


def published_by_a_rank(config, path, folder):
    trainer = Trainer(config, model_path=path, total_updates=1)
    trainer.update(random_sequences(3), policy_objective(AlgorithmConfig()))
    publisher = WeightPublisher(PretrainedShards.of(trainer), folder, keep=2)
    offers = [publisher.publish(version).result() for version in (3, 4)]
    whole = gather_weights(trainer)
    publisher.close()
    own = sum(region.num_bytes for region in ModelLayout(PretrainedShards.of(trainer)).regions)
    return offers[-1], own, None if whole is None else {name: value.numpy() for name, value in whole.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3_moe", {}),
        (THREE_EXPERTS, {}),
        ("qwen3", {"fsdp_size": 1}),
        ("qwen3", {"lora": LoraConfig(rank=2)}),
        ("qwen3_moe", {"lora": LoraConfig(rank=2, target_modules=["q_proj", "o_proj"])}),
    ],
    ids=["dense", "experts", "three-experts", "copies", "adapters", "experts-with-adapters"],
)
def test_two_ranks_publish_their_shards_and_the_file_equals_the_gathered_weights(family, options, tmp_path):
    path = saved(tmp_path, family)
    config = replace(CONFIG, num_ranks=2, **options)
    (offer, first, whole), (none, second, _) = run_on_ranks(2, published_by_a_rank, config, path, str(tmp_path / "p"))
    assert none is None
    FileWeights(offer).verify()
    written = load_file(folder_of(offer) / "model.safetensors")
    assert written.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(written[name], torch.from_numpy(value)), name
    if not options:
        assert first + second == offer.num_bytes
        assert max(first, second) < 0.6 * offer.num_bytes


class NewestOnly:
    """Replaces the log of offers. Only the newest version stays offered."""

    def offer(self, offer):
        return offer.version


def sent_and_received_by_a_rank(config, path, folder, hosts):
    """Publish two versions over the network. Then each rank receives the second version, as an engine's host does."""
    trainer = Trainer(config, model_path=path, total_updates=1)
    rank, directory = trainer.mesh.rank, Path(folder, f"host-{hosts[trainer.mesh.rank]}")
    weights.socket.gethostname = lambda: hosts[rank]
    options = PublishOptions(carrier=Carrier.host_stream, num_receivers=2, timeout_s=60.0, num_held=2)
    publisher = WeightPublisher(
        PretrainedShards.of(trainer), str(directory / "published"), keep=2, options=options, log=NewestOnly()
    )
    offers = [publisher.publish(version).result() for version in (3, 4)]
    dist.broadcast_object_list(offers, src=0)
    received = asyncio.run(receive_weights(offers[-1], directory / "received", timeout_s=60.0))
    left = sorted(path.name for path in (directory / "published").iterdir() if not path.name.startswith(".next-3"))
    dist.barrier()
    assert list(publisher.sender.held_parts) == [4]
    publisher.close()
    whole = gather_weights(trainer)
    return received, left, None if whole is None else {name: value.numpy() for name, value in whole.items()}


@pytest.mark.parametrize(
    ("family", "options", "hosts"),
    [
        ("qwen3", {}, "ab"),
        ("qwen3_moe", {"lora": LoraConfig(rank=2, target_modules=["q_proj"])}, "aa"),
        ("qwen3", {"lora": LoraConfig(rank=2)}, "ab"),
    ],
    ids=["two-hosts", "experts-with-adapters", "computed-on-two-hosts"],
)
def test_weights_that_two_ranks_stream_equal_the_gathered_weights(family, options, hosts, tmp_path):
    path = save_tiny_model(tmp_path / "model", family)
    config = replace(CONFIG, num_ranks=2, **options)
    ranks = run_on_ranks(2, sent_and_received_by_a_rank, config, path, str(tmp_path), hosts)
    whole = ranks[0][2]
    for received, left, _ in ranks:
        FileWeights(received).verify()
        written = load_file(Path(received.manifest).parent / "model.safetensors")
        assert written.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(written[name], torch.from_numpy(value)), name
        assert left in ([], ["v00000003", "v00000004"])
    assert [bool(left) for _, left, _ in ranks] == [True, hosts == "aa"]
    assert not Path(tmp_path, "host-b", "published").exists()


def adapters_of_a_rank(config, path, folder, hosts):
    """Publish the adapters of two versions. Merge each version with the frozen weights, as an engine does.

    Returns three values: the results of `merged_by_an_engine` for both versions, the names of the published folders,
    and the trainer's whole weights. Only rank 0 returns weights.
    """
    trainer = Trainer(config, model_path=path, total_updates=2)
    rank, directory = trainer.mesh.rank, Path(folder, f"host-{hosts[trainer.mesh.rank]}")
    options = PublishOptions(adapters=True)
    if len(set(hosts)) > 1:
        weights.socket.gethostname = lambda: hosts[rank]
        options = replace(options, carrier=Carrier.host_stream, num_receivers=2, timeout_s=60.0)
    shards = PretrainedShards.of(trainer)
    publisher = WeightPublisher(shards, str(directory / "p"), keep=1, options=options, log=NewestOnly())
    stager = WeightStager(f"engine-{rank}", memory=directory / f"memory-{hosts[rank]}", copies=False, timeout_s=60.0)
    seen = []
    for version in (3, 4):
        trainer.update(random_sequences(3), policy_objective(AlgorithmConfig(loss="reinforce")))
        offers = [publisher.publish(version).result()]
        dist.broadcast_object_list(offers, src=0)
        seen.append(asyncio.run(merged_by_an_engine(stager, offers[0])))
        dist.barrier()
    folders = sorted(path.name for path in (directory / "p").iterdir() if not path.name.startswith("."))
    publisher.close()
    return seen, folders, {name: value.numpy() for name, value in (gather_weights(trainer) or {}).items()}


async def merged_by_an_engine(stager, offer):
    async with stager.staged(offer) as local:
        return local.kind, *merged_from(local)


def merged_from(offer):
    """Return a pair: the inode of the manifest of the frozen weights, and the merged weights."""
    adapter = PublishedAdapter(offer)
    frozen = FileWeights(adapter.base)
    frozen.verify()
    merged = {name: t.numpy() for name, t in adapter.merged(frozen.tensors(), torch.device("cpu"))}
    return Path(adapter.base.manifest).stat().st_ino, merged


@pytest.mark.parametrize(
    ("family", "hosts"),
    [("qwen3", "aa"), ("qwen3_moe", "ab"), ("deepseek_v3", "aa")],
    ids=["one-host", "two-hosts-and-experts", "dense-layers-beside-experts"],
)
def test_published_adapters_with_the_frozen_weights_equal_the_merged_weights(family, hosts, tmp_path):
    path = save_tiny_model(tmp_path / "model", family)
    config = replace(CONFIG, num_ranks=2, lora=LoraConfig(rank=3, alpha=6))
    ranks = run_on_ranks(2, adapters_of_a_rank, config, path, str(tmp_path), hosts)
    whole = ranks[0][2]
    for seen, folders, _ in ranks:
        (kind, frozen, before), (_, frozen_again, merged) = seen
        assert kind == "adapter"
        assert frozen == frozen_again, "the frozen weights must be sent only once"
        assert merged.keys() == before.keys() == whole.keys()
        assert all(np.array_equal(merged[name], value) for name, value in whole.items())
        assert any(not np.array_equal(before[name], value) for name, value in whole.items())
        assert folders in (["frozen", "v00000003", "v00000004"], ["frozen", "v00000004"], [])


def test_published_adapters_are_folders_that_peft_loads(tmp_path, publisher_of):
    path = save_tiny_model(tmp_path / "model")
    trainer = Trainer(replace(CONFIG, lora=LoraConfig(rank=2)), model_path=path, total_updates=1)
    trainer.update(random_sequences(3), policy_objective(AlgorithmConfig(loss="reinforce")))
    folder = folder_of(publisher_of(trainer, tmp_path / "p", options=PublishOptions(adapters=True)).publish(7).result())
    frozen = AutoModelForCausalLM.from_pretrained(folder.parent / "frozen", dtype=torch.float32)
    model = PeftModel.from_pretrained(frozen, folder)
    merged = AutoModelForCausalLM.from_pretrained(save_whole(tmp_path / "merged", trainer), dtype=torch.float32)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, merged(ids).logits)


def test_adapters_of_weights_outside_the_checkpoint_are_merged_with_a_warning(
    tmp_path, publisher_of, monkeypatch, caplog
):
    monkeypatch.setattr("learner.model_shards.adapted_layers", lambda model, _: adapted_layers(model, {}))
    path = save_tiny_model(tmp_path / "model")
    trainer = Trainer(replace(CONFIG, lora=LoraConfig(rank=2)), model_path=path, total_updates=1)
    offer = publisher_of(trainer, tmp_path / "p", options=PublishOptions(adapters=True)).publish(1).result()
    assert offer.kind == "full"
    assert re.search(r"adapters are merged before they are published: .* model.layers.0", caplog.text)


def deltas_of_a_rank(config, path, folder):
    """Return a tuple for each version: kind, whether the staged version equals the weights, number of bytes."""
    trainer = Trainer(config, model_path=path, total_updates=1)
    publisher = WeightPublisher(PretrainedShards.of(trainer), folder, keep=-1, options=PublishOptions(full_every=3))
    stager = WeightStager("engine-0", memory=Path(folder, "memory"), copies=True, timeout_s=10)
    seen = []
    for version in range(5):
        for parameter in trainer.head.parameters():
            local_tensor(parameter.data).reshape(-1)[version::41] += 0.5
        offer = publisher.publish(version).result()
        whole = gather_weights(trainer)
        if offer is not None:
            staged = dict(FileWeights(stager.stage(offer)).tensors())
            is_equal = staged.keys() == whole.keys() and all(torch.equal(staged[n], t) for n, t in whole.items())
            own = Path(read_manifest(offer).directory)
            size = sum(f.stat().st_size for f in own.iterdir() if f.name.startswith(("delta", "model")))
            seen.append((offer.kind, is_equal, size))
    publisher.close()
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v3", {"dtype": "bfloat16"}),
        ("qwen3", {}),
        (THREE_EXPERTS, {}),
        ("qwen3", {"fsdp_size": 1}),
        ("qwen3_moe", {"lora": LoraConfig(rank=2, target_modules=["q_proj", "o_proj"])}),
    ],
    ids=["two-dtypes", "dense", "three-experts", "copies", "experts-with-adapters"],
)
def test_deltas_of_two_ranks_result_in_the_gathered_weights(family, options, tmp_path):
    path = saved(tmp_path, family)
    config = replace(CONFIG, num_ranks=2, **options)
    seen, nothing = run_on_ranks(2, deltas_of_a_rank, config, path, str(tmp_path / "p"))
    assert nothing == []
    assert [kind for kind, _, _ in seen] == ["full", "delta", "delta", "full", "delta"]
    assert all(is_equal for _, is_equal, _ in seen)
    if "lora" not in options:
        assert max(seen[index][2] for index in (1, 2, 4)) < 0.2 * seen[0][2]


def test_the_full_version_below_the_oldest_retained_delta_is_not_removed(tmp_path, publisher_of):
    trainer = Trainer(CONFIG, model_path=save_tiny_model(tmp_path / "model"), total_updates=1)
    publisher = publisher_of(trainer, tmp_path / "s", options=PublishOptions(full_every=3))
    kept = []
    for version in range(6):
        publisher.publish(version).result()
        publisher.ready.result()
        kept.append([int(path.name[1:]) for path in sorted((tmp_path / "s").glob("v*"))])
    assert kept == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 4], [3, 4, 5]]


def test_publish_writes_the_weights_from_the_time_of_the_call(tmp_path, publisher_of):
    trainer = Trainer(CONFIG, model_path=save_tiny_model(tmp_path / "model"), total_updates=2)
    before = {name: tensor.clone() for name, tensor in (gather_weights(trainer) or {}).items()}
    pending = publisher_of(trainer, tmp_path / "p").publish(1)
    trainer.update(random_sequences(3), policy_objective(AlgorithmConfig()))
    written = load_file(folder_of(pending.result()) / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in before.items())


def test_old_versions_are_removed_and_only_complete_versions_are_offered(tmp_path, publisher_of):
    trainer = Trainer(CONFIG, model_path=save_tiny_model(tmp_path / "model"), total_updates=1)
    publisher = publisher_of(trainer, tmp_path / "s")
    for version in (9, 10, 11, 11):
        publisher.publish(version).result()
    publisher.close()
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["v00000010", "v00000011"]


def test_writing_a_prepared_file_causes_no_page_faults():
    num_values = 1 << 21
    values = torch.ones(num_values)
    region = Region(name="w", parameter=values, first=0, num_values=num_values, start=64, dtype=torch.float32)
    file = WritableFile(None, 64 + values.nbytes, [region])
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    file.write([region])
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < values.nbytes // mmap.PAGESIZE // 20
    assert torch.equal(file.data[64:].view(torch.float32), values)
    file.close()


def test_a_version_is_offered_only_after_fsync(tmp_path, publisher_of, monkeypatch):
    """The publisher calls fsync for the data file once, before it writes the manifest."""
    publisher = publisher_of(Trainer(CONFIG, model_path=save_tiny_model(tmp_path / "model"), total_updates=1), tmp_path)
    synced, fsync = [], os.fsync

    def record(descriptor):
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, list(tmp_path.rglob("manifest.json"))))

    monkeypatch.setattr("asyncrl.weights.snapshot.os.fsync", record)
    folder = folder_of(publisher.publish(1).result())
    assert synced == [((folder / "model.safetensors").stat().st_ino, [])]


def test_publish_raises_weights_error_if_the_disk_is_full(tmp_path, publisher_of, monkeypatch):
    trainer = Trainer(CONFIG, model_path=save_tiny_model(tmp_path / "model"), total_updates=1)
    publisher = publisher_of(trainer, tmp_path / "s")
    publisher.publish(1).result()
    publisher.ready.result()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("asyncrl.weights.snapshot.os.posix_fallocate", full)
    publisher.publish(2).result()
    with pytest.raises(WeightsError, match=r"no room for \d+ bytes of weights in .*No space left"):
        publisher.publish(3)


class KeptLog:
    """Records the reports of a publisher. ``oldest`` is the oldest version that the buffer can still offer."""

    def __init__(self, oldest=0):
        self.reported = []
        self.oldest = oldest

    def offer(self, offer):
        self.reported.append(offer.version)
        return self.oldest

    def publish_failed(self, reason):
        self.reported.append(reason)


def test_versions_that_the_buffer_may_still_offer_are_not_removed(tmp_path):
    trainer = Trainer(CONFIG, model_path=save_tiny_model(tmp_path / "model"), total_updates=1)
    log = KeptLog(oldest=3)
    publisher = WeightPublisher(PretrainedShards.of(trainer), str(tmp_path / "s"), keep=1, log=log)
    for version in range(1, 6):
        publisher.publish(version)
        publisher.wait()
    publisher.close()
    assert log.reported == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (tmp_path / "s").glob("v*")) == ["v00000003", "v00000004", "v00000005"]


def test_a_failed_write_of_the_manifest_is_reported_to_the_log(tmp_path, monkeypatch):
    trainer = Trainer(CONFIG, model_path=save_tiny_model(tmp_path / "model"), total_updates=1)
    log = KeptLog()
    publisher = WeightPublisher(PretrainedShards.of(trainer), str(tmp_path / "s"), keep=1, log=log)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("asyncrl.weights.publish.Manifest.offer", full)
    publisher.publish(3)
    with pytest.raises(OSError, match="No space left"):
        publisher.wait()
    publisher.close()
    assert log.reported == ["the publish of version 3 failed: OSError: [Errno 28] No space left on device"]


def failed_publish(config, path, folder, where):
    """Publish a version while the method ``where`` fails on rank 1. Returns a pair: this rank's errors and reports."""
    trainer = Trainer(config, model_path=path, total_updates=1)
    log = KeptLog()
    publisher = WeightPublisher(PretrainedShards.of(trainer), folder, keep=2, log=log)
    heard = []
    with pytest.MonkeyPatch.context() as patch:
        if trainer.mesh.rank == 1:

            def full(*_):
                raise OSError(28, "No space left on device")

            patch.setattr(RankPart, where, full)
        for call in (lambda: publisher.publish(7), publisher.wait):
            try:
                call()
            except (OSError, WeightsError) as error:
                heard.append(f"{type(error).__name__}: {error}")
        publisher.close()
    return heard, log.reported


@pytest.mark.parametrize("where", ["write", "finish"])
def test_a_failed_rank_is_reported_to_all_ranks_and_the_log_without_waiting(where, tmp_path):
    path = save_tiny_model(tmp_path / "model")
    config = replace(CONFIG, num_ranks=2)
    first, second = run_on_ranks(2, failed_publish, config, path, str(tmp_path / "p"), where)
    words = "the publish of version 7 failed on rank 1: OSError: [Errno 28] No space left on device"
    assert first == ([f"WeightsError: {words}"], [words])
    own = ["OSError: [Errno 28] No space left on device"] if where == "write" else []
    assert second == ([*own, f"WeightsError: {words}"], [])


def test_a_saved_policy_includes_its_tokenizer(tmp_path: Path) -> None:
    path = Path(save_tiny_model(tmp_path / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "optimizer.pt"):
        (path / name).write_text("{}")
    save_policy(Trainer(CONFIG, model_path=str(path), total_updates=1), str(tmp_path / "policy"))
    names = {file.name for file in (tmp_path / "policy").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"} <= names
    assert "optimizer.pt" not in names


def saved_by_a_rank(config, path, folder):
    """Save the policy, with a different folder per rank. Returns the whole weights on rank 0, else an empty dict."""
    trainer = Trainer(config, model_path=path, total_updates=1)
    trainer.update(random_sequences(3), policy_objective(AlgorithmConfig()))
    save_policy(trainer, f"{folder}/{trainer.mesh.rank}")
    return {name: value.numpy() for name, value in (gather_weights(trainer) or {}).items()}


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3_moe", {}), ("qwen3", {"fsdp_size": 1, "lora": LoraConfig(rank=2)})],
    ids=["experts", "copies-with-adapters"],
)
def test_two_ranks_save_the_gathered_weights_and_rank_1_needs_no_folder(family, options, tmp_path):
    path = save_tiny_model(tmp_path / "model", family)
    whole, _ = run_on_ranks(2, saved_by_a_rank, replace(CONFIG, num_ranks=2, **options), path, str(tmp_path / "p"))
    written = load_file(tmp_path / "p" / "0" / "model.safetensors")
    assert written.keys() == whole.keys()
    assert all(torch.equal(written[name], torch.from_numpy(value)) for name, value in whole.items())
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["0"]


def save_without_room(config, path, folder):
    trainer = Trainer(config, model_path=path, total_updates=1)
    with pytest.MonkeyPatch.context() as patch:
        if trainer.mesh.rank == 0:

            def full(*_):
                raise OSError(28, "No space left on device")

            patch.setattr("asyncrl.weights.snapshot.os.posix_fallocate", full)
        try:
            save_policy(trainer, folder)
        except WeightsError as error:
            return str(error)


def test_saving_without_room_raises_on_every_rank_and_leaves_no_files(tmp_path):
    path = save_tiny_model(tmp_path / "model")
    errors = run_on_ranks(2, save_without_room, replace(CONFIG, num_ranks=2), path, str(tmp_path / "p" / "policy"))
    assert all("the model cannot be written: rank 0: WeightsError: no room for" in error for error in errors)
    assert all(error.endswith("free some space, or choose a folder on another disk") for error in errors)
    assert list((tmp_path / "p").iterdir()) == []
