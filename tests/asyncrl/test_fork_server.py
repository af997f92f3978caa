import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl.cli.fork_proxy import address_of
from asyncrl.cli.fork_server import ForkServer
from asyncrl.core.remote import wait_for_first_end


@pytest.fixture
def server(tmp_path):
    """A server that has imported a module, which says in which process."""
    (tmp_path / "imported_once.py").write_text(
        "import os, tempfile\nPID, FOLDER = os.getpid(), tempfile.gettempdir()\n"
    )
    (tmp_path / "child.py").write_text(
        "import imported_once, os, sys\n"
        "print(imported_once.PID == os.getppid(), sys.argv[1:], os.getcwd(), os.environ['COLOUR'], sys.stdin.read())\n"
        "if sys.argv[1] == 'die': os.kill(os.getpid(), 9)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    (tmp_path / "sleeper.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    log_path = tmp_path / "server.log"
    server = ForkServer(
        ["imported_once"], environment=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}, log_path=log_path
    )
    yield server
    server.stop()
    server.process.wait(30)
    assert log_path.read_text() == ""


def run(server, folder, *arguments, **options):
    options = {"env": {"COLOUR": "blue"}, "cwd": folder, "input": "a question", "timeout": 30} | options
    return subprocess.run([*server.command, *arguments], capture_output=True, text=True, **options)


def sleeping(server, folder):
    """The proxy of a process that sleeps, and that process."""
    proxy = subprocess.Popen([*server.command, str(folder / "sleeper.py")], stdout=subprocess.PIPE)
    return proxy, psutil.Process(int(proxy.stdout.readline()))


def test_a_process_has_all_that_its_proxy_was_given_and_what_the_server_imported(server, tmp_path):
    done = run(server, tmp_path, str(tmp_path / "child.py"), "3", "more words")
    assert done.stdout == f"True ['3', 'more words'] {tmp_path} blue a question\n"
    assert (done.stderr, done.returncode) == ("", 3)


def test_a_module_is_run_too(server, tmp_path):
    assert run(server, tmp_path, "-m", "child", "0").stdout == f"True ['0'] {tmp_path} blue a question\n"


def test_a_proxy_ends_of_the_signal_of_which_its_process_died(server, tmp_path):
    assert run(server, tmp_path, str(tmp_path / "child.py"), "die").returncode == -signal.SIGKILL


def test_a_process_has_the_limits_of_its_proxy_its_temporary_folder_and_a_name_of_its_own(server, tmp_path):
    (tmp_path / "shown.py").write_text(
        "import os, resource, tempfile\n"
        "score = open('/proc/self/oom_score_adj').read().strip()\n"
        "print(os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE), score, os.nice(0))\n"
        "print(tempfile.gettempdir(), open('/proc/self/comm').read())\n"
    )
    cpu = min(os.sched_getaffinity(0))

    def lower():
        os.sched_setaffinity(0, {cpu})
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        Path("/proc/self/oom_score_adj").write_text("900")
        os.setpriority(os.PRIO_PROCESS, 0, 7)

    done = run(server, tmp_path, "-m", "shown", env={"TMPDIR": str(tmp_path)}, preexec_fn=lower)
    assert done.stdout == f"{{{cpu}}} (200, 300) 900 7\n{tmp_path} shown\n\n"


def test_a_process_whose_proxy_is_killed_is_killed_too_and_no_other(server, tmp_path):
    (proxy, process), (other_proxy, other) = sleeping(server, tmp_path), sleeping(server, tmp_path)
    proxy.kill()
    wait_for_first_end([process.pid])
    assert (proxy.wait(), other.is_running(), other_proxy.poll()) == (-signal.SIGKILL, True, None)
    other.kill()
    assert other_proxy.wait(30) == -signal.SIGKILL


def test_what_a_dead_server_forked_dies_with_it_and_later_ones_run_by_themselves(server, tmp_path):
    proxy, process = sleeping(server, tmp_path)
    server.process.kill()
    wait_for_first_end([process.pid])
    assert proxy.wait(30) == 1
    done = run(server, tmp_path, str(tmp_path / "child.py"), "0", env={"COLOUR": "red", "PYTHONPATH": str(tmp_path)})
    assert done.stdout == f"False ['0'] {tmp_path} red a question\n"
    assert "is gone: this process imports everything itself" in done.stderr


def test_nothing_is_forked_from_a_server_with_a_second_thread(tmp_path):
    (tmp_path / "threaded.py").write_text("import threading\nthreading.Thread(target=input, daemon=True).start()\n")
    (tmp_path / "child.py").write_text("print('ran')\n")
    log_path = tmp_path / "server.log"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    server = ForkServer(["threaded"], environment=environment, log_path=log_path)
    assert run(server, tmp_path, str(tmp_path / "child.py")).stdout == "ran\n"
    server.process.wait(30)
    server.stop()
    assert "2 threads run after importing ['threaded'], expected 1" in log_path.read_text()


def test_a_server_whose_owner_is_gone_ends_with_its_last_process(tmp_path):
    (tmp_path / "sleeper.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    owner = (
        "import os, pathlib, sys\n"
        "from asyncrl.cli.fork_server import ForkServer\n"
        f"server = ForkServer([], environment=os.environ, log_path=pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "print(server.process.pid, *server.command, flush=True)\n"
        "sys.stdin.read()\n"
    )
    owning = subprocess.Popen([sys.executable, "-c", owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid, *command = owning.stdout.readline().split()
    server = psutil.Process(int(pid))
    proxy = subprocess.Popen([*command, str(tmp_path / "sleeper.py")], stdout=subprocess.PIPE)
    process = psutil.Process(int(proxy.stdout.readline()))
    owning.kill()
    owning.wait()
    assert server.is_running()
    assert process.is_running()
    process.kill()
    wait_for_first_end([server.pid])
    assert proxy.wait(30) == -signal.SIGKILL


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_has_nothing_run(tmp_path):
    log_path = tmp_path / "log"
    server = ForkServer([], environment=os.environ, log_path=log_path)
    with socket.socket(socket.AF_UNIX) as stranger:
        os.seteuid(65534)
        try:
            stranger.connect(address_of(server.command[-1]))
        finally:
            os.seteuid(0)
        assert stranger.recv(1) == b""
    server.stop()
    server.process.wait(30)
    assert "user 65534 asked, expected 0" in log_path.read_text()
