import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from asyncrl.checks import check_files, check_model, check_options, check_placement
from asyncrl.cli.compose import COMMON_OPTIONS, compose_run, describe, dump_yaml, help_text, read_config
from asyncrl.config import RunConfig, stop_deadlines
from asyncrl.core.errors import DeadlineError, WorkerDiedError, root_cause
from buffer.config import OnStale
from learner.config import AlgorithmConfig, Anchor, Mask, Weight


def test_values_of_an_experiment_override_defaults():
    config = compose_run([])
    assert config.experiment == "quickstart"
    assert config.quickstart
    assert config.learner.optimizer.lr == pytest.approx(1e-3)
    assert config.buffer.on_stale is OnStale.wait


def test_overrides_set_nested_options_with_their_types():
    config = compose_run(["buffer.max_lag=4", "buffer.on_stale=drop", "learner.optimizer.betas=[0.8,0.9]", "seed=7"])
    assert (config.buffer.max_lag, config.buffer.on_stale, config.seed) == (4, OnStale.drop, 7)
    assert list(config.learner.optimizer.betas) == [0.8, 0.9]


@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("buffer.max_lagg=1", ["max_lagg", "did you mean buffer.max_lag"]),
        ("bufer.max_lag=1", ["bufer.max_lag", "did you mean buffer.max_lag"]),
        ("buffer.max_lag=many", ["many", "buffer.max_lag"]),
        ("buffer.max_lag=-1", ["buffer.max_lag must be >= 0", "-1", "0 for synchronous"]),
        ("buffer.on_stale=ignore", ["ignore", "on_stale"]),
        ("learner.sp_size=3", ["learner.sp_size must divide", "3"]),
        ("experiment=nothing", ["nothing", "experiment"]),
        ("rollout_fleet.sampling.top_p=0", ["top_p must be in (0, 1]", "0"]),
        ("buffer.max_lag", ["buffer.max_lag"]),
        ("buffer.max_lag = 3", ["without spaces", "'buffer.max_lag = 3'", "write buffer.max_lag=3"]),
        ("data.train_files=[a b", ["cannot parse 'data.train_files=[a b'", "OPTION=VALUE"]),
        ("model.path=~/m", ["cannot parse 'model.path=~/m'", f"write 'model.path={Path.home()}/m'"]),
        ("data.train_files=[a,~/b]", ["cannot parse", f"write 'data.train_files=[a,{Path.home()}/b]'"]),
        ("data.train_files=x.parquet", ["data.train_files must be a list", "write 'data.train_files=[x.parquet]'"]),
        ("lr=1", ["did you mean", "learner.optimizer.lr", "sft.lr"]),
        ("learner.lr=1", ["unknown option learner.lr", "did you mean learner.optimizer.lr"]),
        ("correction=nothing", ["correction/nothing", "decoupled_ppo icepop mis none tis"]),
        ("experiment=none/such.yaml", ["there is no file", "none/such.yaml"]),
        ("evaluation.num_samples=0", ["evaluation.num_samples must be >= 1", "got 0"]),
        ("sft.batch_size=0", ["sft.batch_size must be >= 1", "got 0"]),
        ("sft.patience=-1", ["sft.patience must be >= 0", "got -1"]),
        ("sft.lr=0", ["sft.lr must be > 0", "got 0"]),
        ("sft.prompt_key=''", ["sft.prompt_key must name a column"]),
        ("placement.cpus_per_engine=0", ["placement.cpus_per_engine must be > 0", "got 0"]),
        ("total_steps=0", ["total_steps must be >= 1", "got 0"]),
        ("+buffer.max_lag=3", ["buffer.max_lag exists already", "write buffer.max_lag=3"]),
        ("~buffer.max_lag", ["buffer.max_lag cannot be removed"]),
        (
            "+buffer.mine=3",
            ["unknown option buffer.mine", "are allowed in", "data.chat_template_kwargs"],
        ),
        ("hydra/launcher=joblib", ["hydra/launcher=joblib", "add --multirun"]),
        ("seed=-1", ["seed must be >= 0, got -1"]),
        ("stop_timeout_s=0", ["stop_timeout_s must be > 0", "got 0"]),
        ("learner.optimizer.weight_decay=-1", ["learner.optimizer.weight_decay must be >= 0", "got -1"]),
        ("learner.optimizer.eps=nan", ["learner.optimizer.eps must be >= 0", "got nan"]),
        ("learner.optimizer.betas=[0.9,1.5]", ["learner.optimizer.betas must be in [0, 1)", "[0.9, 1.5]"]),
        (
            "learner.critic.optimizer.weight_decay=nan",
            ["learner.critic.optimizer.weight_decay must be >= 0", "got nan"],
        ),
        ("learner.lora.alpha=0", ["learner.lora.alpha must be >= 1", "got 0"]),
        ("rollout_fleet.sampling.temperature=nan", ["rollout_fleet.sampling.temperature must be >= 0", "got nan"]),
        ("rollout_fleet.sampling.temperature=inf", ["rollout_fleet.sampling.temperature must be >= 0", "got inf"]),
        ("rollout_fleet.load_timeout_s=nan", ["rollout_fleet.load_timeout_s must be > 0", "got nan"]),
        ("rollout_fleet.sglang.max_total_tokens=-1", ["rollout_fleet.sglang.max_total_tokens must be >= 0", "got -1"]),
        ("buffer.lease_s=nan", ["buffer.lease_s must be > 0", "got nan"]),
        ("buffer.lease_s=inf", ["buffer.lease_s must be > 0 and finite", "got inf"]),
        ("ray.start_timeout_s=-1", ["ray.start_timeout_s must be > 0", "got -1"]),
        ("ray.object_store_bytes=1", ["ray.object_store_bytes must be >= 78643200", "got 1"]),
        ("evaluation.pass_reward=nan", ["evaluation.pass_reward must be a finite number", "got nan"]),
        ("sft.target_accuracy=nan", ["sft.target_accuracy must be >= 0", "got nan"]),
    ],
)
def test_a_wrong_override_is_an_error_with_option_and_value(override, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the test checks the message
        compose_run([override])
    for word in words:
        assert word in str(caught.value)


def test_a_tilde_at_the_start_of_a_path_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    own = tmp_path / "mine.yaml"
    own.write_text("# @package _global_\nexperiment: mine\noutput_dir: ~/runs\nbuffer: {directory: ~/journal}\n")
    config = compose_run([f"experiment={own}", "checkpoint.resume='~/saved'", "weights.directory='a~/weights'"])
    assert (config.output_dir, config.buffer.directory) == (f"{tmp_path}/runs", f"{tmp_path}/journal")
    assert (config.checkpoint.resume, config.weights.directory) == (f"{tmp_path}/saved", "a~/weights")


def test_plus_and_tilde_change_keys_of_dictionary_options_and_groups():
    config = compose_run(
        ["data.chat_template=true", "+data.chat_template_kwargs.thinking=false", "++buffer.max_lag=3", "~experiment"]
    )
    assert (config.data.chat_template_kwargs, config.buffer.max_lag) == ({"thinking": False}, 3)
    assert config.experiment == "run"


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("none", {}),
        ("decoupled_ppo", {"anchor": Anchor.proximal, "weight": Weight.token, "weight_cap": 0.0}),
        ("tis", {"anchor": Anchor.proximal, "weight": Weight.token, "weight_cap": 2.0}),
        (
            "mis",
            {
                "anchor": Anchor.proximal,
                "weight": Weight.sequence,
                "weight_cap": 0.0,
                "masks": [Mask.sequence],
                "sequence_band": [0.0, 2.0],
            },
        ),
        (
            "icepop",
            {
                "anchor": Anchor.proximal,
                "weight": Weight.token,
                "weight_cap": 0.0,
                "masks": [Mask.token],
                "token_band": [0.5, 5.0],
            },
        ),
    ],
)
def test_a_named_correction_has_the_values_of_its_paper(name, want):
    for experiment in ("quickstart", "dapo_math"):
        algorithm = compose_run([f"experiment={experiment}", f"correction={name}"]).algorithm
        assert all(getattr(algorithm, option) == value for option, value in want.items())
        unchanged = {"anchor", "weight", "masks"} - set(want)
        assert all(getattr(algorithm, option) == getattr(AlgorithmConfig(), option) for option in unchanged)


def test_an_option_overrides_a_part_of_a_named_correction():
    algorithm = compose_run(["correction=tis", "algorithm.weight_cap=3"]).algorithm
    assert (algorithm.anchor, algorithm.weight, algorithm.weight_cap) == (Anchor.proximal, Weight.token, 3.0)


def test_a_renamed_option_is_refused_with_the_new_name(tmp_path):
    with pytest.raises(ValueError, match=r"algorithm\.correction; .*correction=tis for token_truncated"):
        compose_run(["algorithm.correction=token_truncated"])
    with pytest.raises(ValueError, match=r"algorithm\.correction_high; .*algorithm.weight_cap, token_band"):
        compose_run(["algorithm.correction_high=2"])
    own = tmp_path / "mine.yaml"
    own.write_text("# @package _global_\nexperiment: mine\nalgorithm:\n  correction: icepop\n")
    with pytest.raises(ValueError, match=r"correction=icepop for token_masked"):
        compose_run([f"experiment={own}"])


def test_a_removed_option_is_refused_and_ignored_in_the_config_of_an_earlier_run(tmp_path):
    with pytest.raises(ValueError, match=r"unknown option ray\.fork_workers; it was removed: .*; leave it out"):
        compose_run(["ray.fork_workers=false"])
    with pytest.raises(ValueError, match=r"learner\.keep_checkpoints; its name is checkpoint\.keep now"):
        compose_run(["learner.keep_checkpoints=3"])
    with pytest.raises(ValueError, match=r"checkpoint\.keep must be -1 or >= 1, got 0"):
        compose_run(["checkpoint.keep=0"])
    written = dump_yaml(compose_run(["seed=3"])).replace("ray:\n", "ray:\n  fork_workers: true\n")
    (tmp_path / "config.yaml").write_text(written)
    assert read_config(tmp_path).seed == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.samples_per_prompt=1"], ["algorithm.samples_per_prompt must be >= 2", "grpo"]),
        (
            ["algorithm.samples_per_prompt=1", "algorithm.advantage=gae", "buffer.filters=[equal_rewards]"],
            ["buffer.filters=[equal_rewards] needs algorithm.samples_per_prompt >= 2, got 1", "remove the filter"],
        ),
        (
            ["total_steps=5", "profile.torch_steps=[4,5,10]"],
            [
                "profile.torch_steps must be below total_steps=5",
                "got [5, 10]",
                "the last step is 4",
                "raise total_steps",
            ],
        ),
        (
            ["rollout_fleet.sampling.top_p=0.9", "rollout_fleet.sampling.top_k=20", "rollout_fleet.sampling.min_p=0.1"],
            ["got top_p=0.9, top_k=20, min_p=0.1", "log-probs of the whole distribution", "asyncrl evaluate"],
        ),
        (["learner.num_ranks=64"], ["algorithm.groups_per_step must be >= 64"]),
        (
            ["rollout_fleet.sglang.tp_size=2", "placement.colocated=true"],
            ["num_ranks must equal rollout_fleet.num_engines x rollout_fleet.sglang.tp_size", "got 1 and 1 x 2"],
        ),
        (["rollout_fleet.engine=scripted"], ["rollout_fleet.engine", "scripted"]),
        (["rollout_fleet.sampling.temperature=0"], ["temperature must be > 0"]),
        (
            ["weights.publish_every=4", "buffer.max_lag=2"],
            ["publish_every must be at most buffer.max_lag + 1 = 3", "got 4"],
        ),
        (
            ["weights.transport=shared_memory", "learner.keep_snapshots=-1"],
            ["weights.transport must be file to keep all versions"],
        ),
        (
            ["weights.transport=collective", "learner.keep_snapshots=-1"],
            ["weights.transport must be file to keep all versions", "got collective"],
        ),
        (
            ["learner.lora.rank=4", "weights.full_every=3"],
            ["weights.full_every must be 1 where adapters are published alone", "got 3", "weights.adapters=false"],
        ),
        (["weights.interface=eth0"], ["weights.interface=eth0 is used by weights.transport=collective", "got auto"]),
        (
            ["weights.collective_into=engine"],
            ["weights.collective_into=engine is used by weights.transport=collective", "got auto"],
        ),
        (
            ["weights.transport=collective", "weights.collective_into=engine", "weights.full_every=2"],
            ["weights.full_every must be 1", "weights.transport=collective, collective_into=engine", "got 2"],
        ),
        (
            ["weights.transport=tensor"],
            ["weights.transport must be auto", "got tensor, which was removed", "collective"],
        ),
        (
            ["weights.transport=shared_memory", "learner.keep_snapshots=-1"],
            ["weights.transport must be file to keep all versions", "got shared_memory"],
        ),
        (
            ["weights.transport=collective", "weights.collective_into=engine", "learner.lora.rank=4"],
            ["weights.adapters must be false", "weights.transport=collective, collective_into=engine"],
        ),
        (["placement.colocated=true", "weights.publish_every=2"], ["publish_every must be 1", "got 2"]),
        (["weights.publish_every=0"], ["weights.publish_every must be >= 1", "got 0"]),
        (["weights.full_every=0"], ["weights.full_every must be >= 1", "got 0"]),
        (
            ["weights.copy_to_memory=true"],
            ["weights.copy_to_memory=True is used by weights.transport=file", "got auto"],
        ),
        (["learner.keep_snapshots=0"], ["learner.keep_snapshots must be -1 or >= 1", "got 0"]),
        (["weights.directory=/mnt/w"], ["weights.directory=/mnt/w is used by weights.transport=file", "got auto"]),
        (["stop_timeout_s=11"], ["stop_timeout_s must be at least", "rollout_fleet.stop_timeout_s=2", "got 11"]),
        (
            ["rollout_fleet.on_reward_failure=drop_trajectory", "algorithm.advantage=remax"],
            ["rollout_fleet.on_reward_failure must be retry_group", "got drop_trajectory"],
        ),
        (
            ["rollout_fleet.environment.on_failure.tool=drop", "algorithm.advantage=remax"],
            ["rollout_fleet.environment.on_failure.tool must be retry or score", "got drop"],
        ),
        (["algorithm.critic=true"], ["algorithm.critic=true", "algorithm.advantage=grpo does not use"]),
        (["algorithm.critic=true", "algorithm.advantage=reinforce_plus_plus"], ["reinforce_plus_plus does not use"]),
    ],
)
def test_contradicting_options_are_refused(overrides, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check_options(compose_run(overrides))
    for word in words:
        assert word in str(caught.value)


def test_rewards_have_weights_and_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fleet = compose_run(["rollout_fleet.rewards=[exact_match,0.2*mine.py:format]"]).rollout_fleet
    assert fleet.reward_weights == {"exact_match": 1.0, f"{tmp_path}/mine.py:format": 0.2}
    assert compose_run(["rollout_fleet.reward=mine.py:f"]).rollout_fleet.reward_weights == {
        f"{tmp_path}/mine.py:f": 1.0
    }


def test_order_and_filters_from_a_users_file_get_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def rank(summary, deadline): return 0\ndef keeps(summary): return True\n")
    buffer = compose_run(["buffer.order=mine.py:rank", "buffer.filters=[equal_rewards,mine.py:keeps]"]).buffer
    assert buffer.order == f"{tmp_path}/mine.py:rank"
    assert buffer.filters == ["equal_rewards", f"{tmp_path}/mine.py:keeps"]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            b"total_steps:3\nmodel: {path: a}\n",
            ["mine.yaml must be valid YAML", "line 3", "could not find expected ':'"],
        ),
        (b"model:\n\tpath: a\n", ["mine.yaml must be valid YAML", "line 4", "'\\t'"]),
        (b"# caf\xe9\n", ["mine.yaml must be valid YAML in UTF-8", "0xe9"]),
        (b"model.path: a\n", ["model.path must be nested in YAML", "write path in the section model"]),
    ],
)
def test_a_mistake_in_a_users_experiment_is_an_error(own, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_bytes(b"# @package _global_\nexperiment: mine\n" + own)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the test checks the message
        compose_run(["experiment=mine.yaml"])
    for word in words:
        assert word in str(caught.value)


def test_a_users_experiment_without_its_suffix_is_an_error_with_the_file_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("# @package _global_\nexperiment: mine\n")
    with pytest.raises(ValueError, match=r"no built-in experiment mine; .* write experiment=mine\.yaml"):
        compose_run(["experiment=mine"])


@pytest.mark.parametrize("name", ["../elsewhere", "/elsewhere", ".", "a/../.."])
def test_a_users_experiment_must_be_named_like_a_folder_below_the_output_directory(name, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"# @package _global_\nexperiment: {name}\n")
    with pytest.raises(ValueError, match=r"experiment must be .*output_dir"):
        compose_run([f"experiment={tmp_path}/mine.yaml"])


def test_a_users_experiment_is_selected_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = "# @package _global_\nexperiment: mine\ndefaults: [quickstart, _self_]\ntotal_steps: 7\n"
    for name in ("mine.yaml", "2024.yaml", "true.yaml", "run,1.yaml", "a=b.yaml"):
        (tmp_path / name).write_text(own)
        config = compose_run([f"experiment={name}", "seed=3"])
        assert (config.experiment, config.total_steps, config.seed, config.quickstart) == ("mine", 7, 3, True)
    (tmp_path / "nameless.yaml").write_text("# @package _global_\ntotal_steps: 7\n")
    with pytest.raises(ValueError, match="add a line 'experiment: nameless'"):
        compose_run(["experiment=nameless.yaml"])
    (tmp_path / "other.yaml").write_text("total_steps: 7\n")
    with pytest.raises(ValueError, match="must contain the line '# @package _global_'"):
        compose_run(["experiment=other.yaml"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "data.train_files must name at least one"),
        (["data.train_files=[{train}]"], "data.eval_files must name at least one"),
        (
            ["data.train_files=[{train}]", "evaluation.enabled=false", "data.max_prompt_tokens=200"],
            r"must be <= the model's 128 positions less 6 that SGLang reserves, got 200 \+ 512",
        ),
        (
            [
                "data.train_files=[{train}]",
                "data.eval_files=[{held_out}]",
                "data.max_prompt_tokens=9",
                "rollout_fleet.sampling.max_new_tokens=12",
                "learner.critic.path=nowhere",
            ],
            "learner.critic.path must hold a Hugging Face model, got nowhere",
        ),
    ],
)
def test_missing_or_contradicting_files_are_refused_with_the_option(assets, overrides, words):
    overrides = [override.format(train=assets.train, held_out=assets.held_out) for override in overrides]
    config = compose_run(["experiment=custom", f"model.path={assets.model}", *overrides])
    with pytest.raises(ValueError, match=words):
        check_files(config)


@pytest.mark.parametrize(
    ("missing", "words"),
    [("model.safetensors", "must hold weights"), ("tokenizer_config.json", "must hold a tokenizer")],
)
def test_an_incomplete_model_is_refused(assets, tmp_path, missing, words):
    shutil.copytree(assets.model, tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    with pytest.raises(ValueError, match=words):
        check_model(compose_run(["experiment=custom", f"model.path={tmp_path / 'model'}"]))


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("model.safetensors", cut, "must be whole, got .*file not fully covered.*; download"),
        ("model.safetensors", lambda file: file.write_bytes(b""), "must be whole, got .*; download"),
        ("config.json", lambda file: file.write_text("{oops"), "must be whole, got .*Expecting property.*; download"),
        ("config.json", lambda file: file.write_text("[1]"), "must be whole, got .*not a JSON object.*; download"),
        ("tokenizer_config.json", cut, "must be whole, got .*; download"),
        ("tokenizer.json", cut, "must be whole, got .*; download"),
    ],
)
def test_a_damaged_model_file_is_refused_by_name(assets, tmp_path, name, damage, words):
    shutil.copytree(assets.model, tmp_path / "model")
    damage(tmp_path / "model" / name)
    files = [f"data.train_files=[{assets.train}]", f"data.eval_files=[{assets.held_out}]"]
    fits = ["data.max_prompt_tokens=9", "rollout_fleet.sampling.max_new_tokens=12", "algorithm.advantage=gae"]
    for option in ("model.path", "learner.critic.path"):
        models = [f"model.path={assets.model}", f"{option}={tmp_path / 'model'}"]
        with pytest.raises(ValueError, match=f"{option}: .*/model/{name} {words}"):
            check_files(compose_run(["experiment=custom", *files, *fits, *models]))


def test_a_hub_name_as_model_path_is_refused_with_the_download_command():
    config = compose_run(["experiment=custom", "model.path=Qwen/Qwen3-0.6B"])
    with pytest.raises(ValueError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir DIR"):
        check_model(config)


@pytest.mark.parametrize("path", ["warm", "/none/warm", "./outputs/a/b"])
def test_a_wrong_model_path_that_is_not_a_hub_name_has_no_download_command(path):
    with pytest.raises(ValueError, match=r"must be a directory .*, got .*(warm|b); check the path$"):
        check_model(compose_run(["experiment=custom", f"model.path={path}"]))


def test_a_model_path_without_a_model_is_refused(tmp_path):
    config = compose_run(["experiment=custom", f"model.path={tmp_path}", "data.train_files=[a.jsonl]"])
    with pytest.raises(ValueError, match=r"model\.path must hold a Hugging Face model, got .* without config\.json"):
        check_files(config)


def test_a_placement_error_names_requested_and_available_resources():
    devices = ["learner.device=cuda", "rollout_fleet.device=cuda"]
    gpus = compose_run([*devices, "learner.num_ranks=8", "rollout_fleet.num_engines=4"])
    with pytest.raises(ValueError, match=r"asks for 12 GPUs .* only 2 are available"):
        check_placement(gpus, num_cpus=64, num_gpus=2)
    cpus = compose_run(["placement.oversubscribe=false", "learner.num_ranks=4", "rollout_fleet.num_engines=2"])
    with pytest.raises(ValueError, match=r"asks for 6 CPUs .* only 2 are available"):
        check_placement(cpus, num_cpus=2, num_gpus=0)
    check_placement(cpus, num_cpus=6, num_gpus=0)


def test_the_written_configuration_composes_to_the_same_run():
    config = compose_run(["buffer.max_lag=3", "sft.train_files=[x.parquet]"])
    written = OmegaConf.create(dump_yaml(config))
    again = OmegaConf.merge(OmegaConf.structured(config), {})
    assert OmegaConf.to_container(written) == OmegaConf.to_container(again, enum_to_str=True)


def leaves(text):
    """Return the dotted names of all options in a YAML text.

    An empty mapping is an option. Other mappings are sections.
    """

    def walk(node, prefix):
        for name, value in node.items():
            yield from walk(value, f"{prefix}{name}.") if value and isinstance(value, dict) else [prefix + name]

    return list(walk(OmegaConf.to_container(OmegaConf.create(text)), ""))


def test_every_option_is_documented_and_the_common_ones_exist():
    documented = describe(RunConfig())
    assert sorted(documented) == sorted(leaves(dump_yaml(RunConfig())))
    assert all(meaning for meaning, _ in documented.values())
    assert set(COMMON_OPTIONS) <= set(documented)
    page = help_text(compose_run([]), everything=False)
    assert "buffer.max_lag=" in page
    assert "Staleness bound in learner steps" in page
    assert "One of: wait, requeue, drop." in page
    everything = help_text(compose_run([]), everything=True)
    assert "One of: token_mean, sequence_mean, sequence_sum_norm." in everything
    assert "placement.colocated=false" in everything


def test_importing_the_configuration_loads_no_heavy_package():
    script = (
        "import sys, asyncrl.config, buffer, rollout_fleet, asyncrl.core;"
        "sys.exit(', '.join(sorted({'torch', 'ray', 'sglang'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_death_or_a_bug_is_the_root_cause_and_not_a_missed_deadline():
    deadline, death, bug = DeadlineError("late"), WorkerDiedError("dead"), KeyError("bug")
    assert root_cause(ExceptionGroup("", [deadline, bug, death])) is death
    assert root_cause(ExceptionGroup("", [deadline, ExceptionGroup("", [bug])])) is bug


def test_renewal_slower_than_the_lease_is_refused():
    with pytest.raises(ValueError, match=r"renew_every_s must be at most half of buffer\.lease_s=15, got 20"):
        check_options(compose_run(["buffer.lease_s=15", "rollout_fleet.renew_every_s=20"]))


def test_the_deadlines_of_a_stop_are_nested():
    config = compose_run([])
    deadlines = stop_deadlines(config)
    assert deadlines.fleet_s > config.rollout_fleet.server_stop_timeout_s > config.rollout_fleet.stop_timeout_s
    assert deadlines.total_s < config.stop_timeout_s


def test_a_log_on_a_full_disk_is_reported_once_in_one_line():
    code = (
        "import logging; from pathlib import Path; from asyncrl.cli.train_command import _log_to\n"
        "_log_to(Path('/dev/full')); logging.error('one'); logging.error('two')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[0] == (
        "warning: the controller cannot write /dev/full: [Errno 28] No space left on device"
    )
    assert "Logging error" not in done.stderr


def test_a_full_disk_under_log_and_terminal_output_does_not_end_the_run():
    code = (
        "import logging, os, sys; from pathlib import Path; from asyncrl.cli.train_command import _log_to\n"
        "sys.stderr = open('/dev/full', 'w', buffering=1)\n"
        "_log_to(Path('/dev/full')); logging.error('one'); os._exit(0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("text", ["", '{"a": ', "3\n", "- 1\n"])
def test_a_damaged_configuration_of_a_run_is_refused_by_name(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/config\.yaml must hold the options of the run.*restore the file"
    ) as got:
        read_config(tmp_path)
    assert "\n" not in str(got.value)
