"""Resumed runs: the checkpoint from which they continue, and the prompts that they generate next."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.core.errors import ReplayBufferError
from asyncrl.run.resume import (
    Resumed,
    RunState,
    begin_buffer_at,
    check_beginning,
    find_checkpoint,
    learning_options,
)
from asyncrl.run.run_folder import hold_shared_folder, shared_folder
from buffer.config import BufferConfig, Durability
from buffer.journal import Journal
from buffer.keys import make_keys
from learner.checkpoint_folder import keep_newest, named_checkpoints, part_of, read_progress, write_progress
from tests.support.checkpoints import STATE, save


def config_of(tmp_path, *overrides):
    return compose_run([f"output_dir={tmp_path}", "experiment=custom", "total_steps=50", *overrides])


class Letters:
    """A tokenizer with one token per letter."""

    def __call__(self, texts, **_):
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_the_state_of_a_run_survives_json():
    assert RunState.from_dict(json.loads(json.dumps(STATE.to_dict()))) == STATE
    with pytest.raises(ValueError, match="not the checkpoint of a run"):
        RunState.from_dict({})
    with pytest.raises(ValueError, match="another version of asyncrl saved this checkpoint"):
        RunState.from_dict({**STATE.to_dict(), "finished": [[0, 5]], "tokens_trained": 60})


def test_only_changed_options_of_learning_are_reported(tmp_path):
    state = replace(STATE, options=learning_options(config_of(tmp_path)))
    again = RunState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert again.changed_options(config_of(tmp_path, "learner.num_ranks=2", "total_steps=99")) == []
    other = config_of(tmp_path, "learner.optimizer.lr=3e-4", "algorithm.groups_per_step=16", "buffer.max_lag=5")
    assert again.changed_options(other) == [
        "algorithm.groups_per_step was 32, is 16",
        "learner.optimizer.lr was 1e-06, is 0.0003",
        "buffer.max_lag was 2, is 5",
    ]
    assert STATE.changed_options(other) == [], "a checkpoint without options must not report changes"


def test_a_new_run_resumes_nothing(tmp_path):
    assert find_checkpoint(config_of(tmp_path)) is None
    assert find_checkpoint(config_of(tmp_path, "checkpoint.resume=auto")) is None


def test_resume_auto_selects_the_newest_checkpoint_of_the_newest_run_with_a_checkpoint(tmp_path):
    runs = tmp_path / "custom"
    save(runs / "2026-01-01_00-00-00" / "checkpoints", 30)
    newest = save(runs / "2026-01-02_00-00-00" / "checkpoints", 20)
    save(runs / "2026-01-02_00-00-00" / "checkpoints", 10)
    (runs / "2026-01-03_00-00-00" / "checkpoints" / ".v00000040.partial").mkdir(parents=True)
    found = find_checkpoint(config_of(tmp_path, "checkpoint.resume=auto"))
    assert (found.checkpoint, found.state.version) == (newest, 20)


def test_resume_accepts_the_path_of_a_checkpoint_or_of_a_folder_of_checkpoints(tmp_path):
    first, second = save(tmp_path / "c", 10), save(tmp_path / "c", 20)
    for path, want in ((first, first), (tmp_path / "c", second)):
        assert find_checkpoint(config_of(tmp_path, f"checkpoint.resume={path}")).checkpoint == want
    with pytest.raises(ValueError, match="no checkpoint at"):
        find_checkpoint(config_of(tmp_path, f"checkpoint.resume={tmp_path}/nowhere"))
    with pytest.raises(ValueError, match="total_steps must be above the 20 steps"):
        find_checkpoint(config_of(tmp_path, f"checkpoint.resume={tmp_path}/c", "total_steps=20"))


def test_a_run_with_a_critic_resumes_from_the_newest_checkpoint_of_actor_and_critic(tmp_path):
    older, newest = (save(tmp_path / "c", version, parts=["critic"]) for version in (10, 20))
    save(tmp_path / "c" / "critic", 10)
    options = [f"checkpoint.resume={tmp_path}/c", "algorithm.advantage=gae"]
    assert find_checkpoint(config_of(tmp_path, *options)).checkpoint == older
    save(tmp_path / "c" / "critic", 20)
    assert find_checkpoint(config_of(tmp_path, *options)).checkpoint == newest


def resumed_at(folder: Path) -> Resumed:
    return Resumed(checkpoint=save(folder, 4), state=STATE)


def test_a_buffer_starts_from_the_checkpoint_and_an_unrelated_journal_is_moved_away(tmp_path):
    options = BufferConfig(durability=Durability.disk, directory=str(tmp_path / "buffer"))
    resumed = resumed_at(tmp_path / "c")
    with pytest.raises(ValueError, match=r"needs the buffer's part in .*/c/buffer/v00000004, got none"):
        begin_buffer_at(options, resumed)
    (tmp_path / "c" / "buffer" / "v00000004").mkdir(parents=True)
    (tmp_path / "buffer").mkdir()
    (tmp_path / "buffer" / "journal.1.log").write_text("of another release")
    begins = {"lineage": "life 1", "checkpoint": str(tmp_path / "c" / "buffer" / "v00000004")}
    assert asdict(begin_buffer_at(options, resumed)) == asdict(options) | begins
    assert not (tmp_path / "buffer").exists()
    (aside,) = tmp_path.glob("buffer.before-resume-*")
    assert (aside / "journal.1.log").read_text() == "of another release"


def test_a_journal_that_a_running_buffer_uses_is_not_moved_away(tmp_path):
    resumed = resumed_at(tmp_path / "c")
    (tmp_path / "c" / "buffer" / "v00000004").mkdir(parents=True)
    (tmp_path / "buffer").mkdir()
    journal = Journal(tmp_path / "buffer" / "journal")
    try:
        with pytest.raises(ReplayBufferError, match=r"journal is held by another server; .*, or give"):
            begin_buffer_at(BufferConfig(durability=Durability.disk, directory=str(tmp_path / "buffer")), resumed)
        assert (tmp_path / "buffer").exists()
    finally:
        journal.close()


def test_a_buffer_starts_from_its_journal_if_the_journal_has_the_checkpoint(tmp_path):
    options = BufferConfig(durability=Durability.disk, directory=str(tmp_path / "buffer"))
    resumed = resumed_at(tmp_path / "c")
    (tmp_path / "c" / "buffer" / "v00000004").mkdir(parents=True)
    (tmp_path / "buffer").mkdir()
    journal = Journal(tmp_path / "buffer" / "journal")
    journal.write("epoch", "earlier")
    journal.write("checkpoints", ["3", "4"])
    journal.close()
    assert asdict(begin_buffer_at(options, resumed)) == asdict(options) | {
        "lineage": "life 1",
        "earlier_epoch": "earlier",
    }
    assert (tmp_path / "buffer").exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("checkpoint.every_steps=-1", "checkpoint.every_steps must be >= 0, got -1"),
        ("checkpoint.resume=''", "checkpoint.resume must be 'never', 'auto' or a path"),
    ],
)
def test_a_wrong_option_is_named(option, words):
    with pytest.raises(ValueError, match=words):
        compose_run([option])


def test_a_new_run_on_a_used_buffer_folder_is_refused_before_anything_starts(tmp_path):
    options = ["buffer.durability=disk", f"buffer.directory={tmp_path / 'buffer'}"]
    check_beginning(config_of(tmp_path, *options))
    (tmp_path / "buffer").mkdir()
    check_beginning(config_of(tmp_path, *options))
    (tmp_path / "buffer" / "journal.1.log").touch()
    with pytest.raises(ValueError, match=r"buffer\.directory=.* must be empty.*checkpoint\.resume=auto"):
        check_beginning(config_of(tmp_path, *options))
    save(tmp_path / "custom" / "2026-01-01_00-00-00" / "checkpoints", 30)
    check_beginning(config_of(tmp_path, *options, "checkpoint.resume=auto"))


def test_a_finished_run_is_refused_before_anything_starts(tmp_path):
    save(tmp_path / "custom" / "2026-01-01_00-00-00" / "checkpoints", 50)
    with pytest.raises(ValueError, match="total_steps must be above the 50 steps"):
        check_beginning(config_of(tmp_path, "checkpoint.resume=auto"))


def test_keys_of_two_runs_are_refused_before_anything_starts(tmp_path):
    for name in ("one", "other"):
        make_keys(tmp_path / name)
    check_beginning(config_of(tmp_path, f"buffer.keys={tmp_path / 'one'}"))
    check_beginning(config_of(tmp_path, f"buffer.keys={tmp_path / 'new'}"))
    (tmp_path / "other" / "learner.json").replace(tmp_path / "one" / "learner.json")
    with pytest.raises(ValueError, match=r"buffer\.keys=.* must hold the keys of one run.*learner\.json"):
        check_beginning(config_of(tmp_path, f"buffer.keys={tmp_path / 'one'}"))


def test_a_checkpoint_folder_of_a_running_run_is_refused_before_anything_starts(tmp_path):
    kept, life = tmp_path / "kept", tmp_path / "life"
    theirs = save(kept, 12)
    write_progress(theirs, replace(read_progress(theirs), life=str(life)))
    options = [f"checkpoint.directory={kept}", "checkpoint.resume=auto"]
    check_beginning(config_of(tmp_path, *options))
    lock = hold_shared_folder(life)
    try:
        with pytest.raises(ValueError, match=rf"checkpoint.directory={kept} must not be in use, .*{life} "):
            check_beginning(config_of(tmp_path, *options))
    finally:
        os.close(lock)
        shared_folder(life).rmdir()


def test_old_checkpoints_of_another_run_in_the_same_folder_are_kept(tmp_path):
    other = replace(STATE, lineage="another run")
    theirs = [save(tmp_path, version, other, parts=["buffer"]) for version in (1, 6, 90)]
    for path in theirs:
        part_of(path, "buffer").mkdir(parents=True)
    own = [save(tmp_path, version) for version in (3, 4, 5)]
    keep_newest(own[-1], keep=2)
    assert named_checkpoints(tmp_path) == [theirs[0], *own[1:], *theirs[1:]]
    assert all(part_of(path, "buffer").is_dir() for path in theirs)


def test_after_a_rewind_the_newest_checkpoint_and_all_later_versions_are_kept(tmp_path):
    later = [save(tmp_path, version) for version in (8, 9)]
    own = [save(tmp_path, version) for version in (3, 4)]
    keep_newest(own[-1], keep=1)
    assert named_checkpoints(tmp_path) == [own[-1], *later]


def test_a_checkpoint_folder_of_another_run_is_refused_before_anything_starts(tmp_path):
    kept = tmp_path / "kept"
    theirs = save(kept, 12)
    with pytest.raises(ValueError, match=rf"checkpoint.directory={kept} must hold only checkpoints of this run, got "):
        check_beginning(config_of(tmp_path, f"checkpoint.directory={kept}"))
    other = save(tmp_path / "other", 3, replace(STATE, lineage="another run"))
    with pytest.raises(ValueError, match=r"v00000012 of another run; .* empty directory, or continue"):
        check_beginning(config_of(tmp_path, f"checkpoint.directory={kept}", f"checkpoint.resume={other}"))
    check_beginning(config_of(tmp_path, f"checkpoint.directory={kept}", "checkpoint.resume=auto"))
    check_beginning(config_of(tmp_path, f"checkpoint.directory={kept}", f"checkpoint.resume={theirs}"))
