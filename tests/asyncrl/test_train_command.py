"""The end of the command ``asyncrl train``: exit status, last output, and processes. The training is scripted."""

import os
import shlex
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

import asyncrl.cli
from asyncrl.cli import train_command
from asyncrl.cli.compose import compose_run
from asyncrl.cli.train_command import how_to_continue
from asyncrl.config import override_of
from tests.support.checkpoints import save

PRELUDE = """
import asyncio, logging, os, signal, sys
from asyncrl.cli import train_command
from asyncrl.core.errors import ClusterDiedError, DeadlineError, WorkerDiedError

async def run(config, run_dir, overrides, view, on_fault):
{body}

train_command._run = run
train_command.check_options = lambda config: None  # so that stop_timeout_s may be shorter than real parts need
sys.exit(train_command.main(["output_dir=" + sys.argv[1], *sys.argv[2:]]))
"""
READY = """
print("ready", os.getpid(), flush=True)
try:
    await asyncio.sleep(3600)
finally:
    print("stopping", flush=True)
    await asyncio.sleep({seconds})
"""


class Command:
    """``asyncrl train`` in a separate process. Its stdout and stderr are one stream."""

    def __init__(self, body, output_dir, *options):
        script = PRELUDE.format(body=textwrap.indent(textwrap.dedent(body), "    "))
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, str(output_dir), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def line_with(self, words):
        return next(line for line in self.process.stdout if words in line)

    def end(self):
        """Wait for the end of the command. Returns its exit status and the output that was not read before."""
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output.strip()


@pytest.fixture
def start(tmp_path):
    commands = []

    def start(body, *options):
        commands.append(Command(body, tmp_path, *options))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.process.wait()


def test_a_controller_that_is_killed_is_reported_with_the_end_of_its_log(start):
    body = 'logging.getLogger().warning("about to die")\nos.kill(os.getpid(), signal.SIGKILL)'
    status, output = start(body).end()
    assert status == 1
    assert "error: the controller died of SIGKILL" in output
    assert "about to die" in output
    assert output.splitlines()[-1].startswith("error: the controller died of SIGKILL")


@pytest.mark.long
def test_the_last_line_has_the_first_and_the_last_line_of_the_cause(start):
    body = (
        'raise ExceptionGroup("all", [DeadlineError("late"), WorkerDiedError("sglang-0 died:\\nstarting\\nno memory")])'
    )
    status, output = start(body).end()
    assert status == 1
    assert output.splitlines()[-1] == "error: sglang-0 died: … no memory"
    assert "sglang-0 died:\nstarting\nno memory" in output


@pytest.mark.long
def test_an_unexpected_exception_is_named_with_its_type(start):
    status, output = start('raise KeyError("step")').end()
    assert (status, output.splitlines()[-1]) == (1, "error: KeyError: 'step'")


@pytest.mark.long
def test_the_death_of_ray_ends_the_run_immediately(start):
    body = """
        try:
            on_fault(ClusterDiedError("gcs died"))
        finally:
            print("stopping", flush=True)
    """
    status, output = start(body).end()
    assert (status, output.splitlines()[-1]) == (1, "error: gcs died")
    assert "stopping" not in output


@pytest.mark.long
@pytest.mark.parametrize("end", ['raise WorkerDiedError("gone")', "os.kill(os.getpid(), signal.SIGKILL)"])
@pytest.mark.parametrize("saved_by", ["this life", "the life before"])
def test_a_run_that_fails_names_the_command_that_continues_it(start, tmp_path, end, saved_by):
    body = f"""
        from asyncrl.run.run_lives import begin_life
        from tests.support.checkpoints import save

        earlier = save(Path(config.output_dir, "before/checkpoints"), 2)
        begin_life(run_dir, earlier)
        if {saved_by == "this life"}:
            save(run_dir / "checkpoints", 4)
        {end}
    """
    status, output = start("from pathlib import Path\n" + textwrap.dedent(body), "total_steps=9").end()
    *_, command, headline = output.splitlines()
    assert status == 1
    assert headline.startswith("error: ")
    assert command.startswith("to continue: asyncrl train output_dir=")
    expected = "*/*/checkpoints/v00000004" if saved_by == "this life" else "before/checkpoints/v00000002"
    [checkpoint] = tmp_path.glob(expected)
    assert command.endswith(f" total_steps=9 checkpoint.resume={checkpoint}")


@pytest.mark.long
@pytest.mark.parametrize("name", ["a b", "Zoë (new), [x]=1", "it's; here", "12", "back\\slash\\", "plain/v1:a-b"])
def test_the_printed_command_continues_a_run_with_any_folder_name(tmp_path, name):
    checkpoint = save(tmp_path / name / "checkpoints", 4)
    config = compose_run([override_of("output_dir", name)])
    assert config.output_dir == name
    command = how_to_continue(config, checkpoint.parent.parent, [override_of("output_dir", name)])
    asyncrl, train, *options = shlex.split(command.removeprefix("to continue: "))
    assert (asyncrl, train) == ("asyncrl", "train")
    continued = compose_run(options)
    assert (continued.output_dir, continued.checkpoint.resume) == (name, str(checkpoint))


@pytest.mark.long
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_with_a_message(start, number, expected):
    command = start(READY.format(seconds=0))
    command.line_with("ready")
    command.process.send_signal(number)
    status, output = command.end()
    assert status == expected
    assert "stopping" in output.splitlines()
    assert f"stopped by {number.name}" in output.splitlines()[-1]


@pytest.mark.long
def test_a_second_signal_kills_a_run_without_its_supervisor(start):
    command = start(READY.format(seconds=3600), "stop_timeout_s=120")
    controller = psutil.Process(int(command.line_with("ready").split()[1]))
    command.process.kill()
    command.line_with("stopping")  # the run stops because its supervisor died
    os.kill(controller.pid, signal.SIGTERM)
    controller.wait(60)


def test_a_run_that_does_not_stop_in_time_prints_a_command_that_can_be_copied(start):
    save = 'from tests.support.checkpoints import save\nsave(run_dir / "checkpoints", 4)\n'
    command = start(save + READY.format(seconds=3600), "stop_timeout_s=0.5")
    command.line_with("ready")
    command.process.send_signal(signal.SIGTERM)
    last = command.end()[1].splitlines()[-1]
    assert "stopping took longer than stop_timeout_s" in last
    assert last.endswith("/checkpoints/v00000004")


def test_a_failed_record_of_the_end_is_reported_and_does_not_change_the_exit_status(start):
    body = """
        from asyncrl.metrics import LifeRecord, write_life
        write_life(run_dir, LifeRecord(host="here", began_s=1.0))
        (run_dir / ".life.json").mkdir()  # like a full disk, it makes the next write fail
    """
    status, output = start(body).end()
    assert status == 0
    assert "warning: the end of the run cannot be written to" in output
    assert "/life.json: " in output
    assert "error" not in output


@pytest.mark.long
def test_a_run_killed_at_the_stop_deadline_reports_its_end_once(start):
    body = """
        import subprocess
        worker = await asyncio.create_subprocess_exec("sleep", "3600")
        caretaker = subprocess.Popen(["bash", "-c", "trap '' INT; sleep 3600"])  # is killed seconds after the worker
        print("ready", flush=True)
        try:
            await asyncio.sleep(3600)
        finally:
            await worker.wait()
    """
    command = start(body, "stop_timeout_s=0.5")
    command.line_with("ready")
    command.process.send_signal(signal.SIGTERM)
    status, output = command.end()
    endings = [line for line in output.splitlines() if line.startswith("stopped by SIGTERM")]
    assert status == 143
    assert len(endings) == 1
    assert "stopping took longer than stop_timeout_s" in endings[0]


def test_a_run_without_its_supervisor_gives_up_at_the_stop_deadline(start):
    command = start(READY.format(seconds=3600), "stop_timeout_s=0.5")
    controller = psutil.Process(int(command.line_with("ready").split()[1]))
    command.process.kill()
    assert "stopping took longer than stop_timeout_s" in command.line_with("stopped by the death of its supervisor")
    controller.wait(60)


@pytest.mark.parametrize(
    ("option", "status", "words"), [("--help", 0, "OPTION=VALUE"), ("nope=1", 2, "unknown option nope")]
)
def test_a_training_ends_even_if_a_library_hangs_at_the_exit_of_python(option, status, words):
    code = "import atexit, time; atexit.register(time.sleep, 600); import asyncrl.cli; asyncrl.cli.command_line()"
    command = [sys.executable, "-c", code, "train", option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == status
    assert words in done.stdout + done.stderr


def test_the_command_lists_its_subcommands_and_refuses_others(capsys):
    assert asyncrl.cli.main([]) == 0
    assert "train" in capsys.readouterr().out
    assert asyncrl.cli.main(["trian"]) == 2
    assert "unknown command 'trian', expected one of train, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--nope"], 2, "unknown flag --nope, expected OPTION=VALUE"),
        (["buffer.max_lag=-1"], 2, "buffer.max_lag must be >= 0"),
        (["--help"], 0, "buffer.max_lag=2"),
        (["--help-all"], 0, "learner.optimizer.clip_grad_norm=1.0"),
        (["--print-config", "seed=7"], 0, "seed: 7"),
    ],
)
def test_train_shows_a_page_or_an_error_without_starting_a_run(capsys, arguments, status, words):
    assert train_command.main(arguments) == status
    shown = capsys.readouterr()
    assert words in (shown.err if status else shown.out)
