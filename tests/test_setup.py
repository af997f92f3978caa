"""scripts/setup.sh with fake versions of Python, pip, uv, nvidia-smi and getconf."""

import os
import shutil
import subprocess
import tomllib
from concurrent.futures import ThreadPoolExecutor

import pytest
from packaging.requirements import Requirement

from tests.support.training_run import ROOT

TOOLS = ("bash", "cat", "cp", "cut", "flock", "grep", "mkdir", "rm", "sha256sum", "sleep", "sort", "tail")
PYTHON = """#!/bin/sh
# Acts as Python 3.{minor}: makes environments with itself in them, and writes down what pip is asked for.
case "$1 $2" in
"- ") [ "$LIBCUDA" = new ] ;;
"-c "*) [ {minor} -ge 11 ] && [ {minor} -le 13 ] ;;
"--version "*) echo "Python 3.{minor}.0" ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") echo "$@" >>pip.log; sleep "${{PIP_S:-0}}" ;;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >>pip.log
for venv; do :; done
mkdir -p "$venv/bin" && cp "$STAND_INS/any-python" "$venv/bin/python"
"""
NVIDIA_SMI = """#!/bin/sh
[ "$DRIVER" != none ] || {{ echo "NVIDIA-SMI has failed because it could not communicate with the driver."; exit 9; }}
echo "$DRIVER, $CAPABILITY, NVIDIA Pretended"
"""
GETCONF = """#!/bin/sh
[ "$GLIBC" != none ] && echo "glibc $GLIBC"
"""
H100 = {"DRIVER": "580.65.06", "CAPABILITY": "9.0", "GLIBC": "2.34"}


@pytest.fixture
def setup(tmp_path):
    """Return a function that runs scripts/setup.sh in a copy of the repository.

    The function returns three values: the exit status, the lines on stderr, and the calls of pip.
    """
    folder, stand_ins = tmp_path / "repository", tmp_path / "bin"
    stand_ins.mkdir()
    (folder / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh", "scripts/sglang-cpu.txt"):
        shutil.copy(ROOT / name, folder / name)
    for tool in TOOLS:
        (stand_ins / tool).symlink_to(shutil.which(tool))

    def write(name, text):
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)

    def run(*, minor=12, has_uv=False, gpu=None, after="true", **options):
        write(f"python3.{minor}" if minor in (11, 12, 13) else "python3", PYTHON.format(minor=minor))
        write("getconf", GETCONF)
        if gpu is not None:
            write("nvidia-smi", NVIDIA_SMI.format())
        if has_uv:
            write("any-python", PYTHON.format(minor=12))
            write("uv", UV)
        environment = {"PATH": str(stand_ins), "STAND_INS": str(stand_ins), "GLIBC": "2.36", **(gpu or {}), **options}
        command = ["bash", "-c", f"source scripts/setup.sh; {after}"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        log = folder / "pip.log"
        calls = log.read_text() if log.exists() else ""
        log.unlink(missing_ok=True)
        return done.returncode, done.stderr, calls

    return run


def test_setup_without_a_gpu_installs_the_cpu_packages_once(setup):
    status, words, calls = setup()
    assert status == 0, words
    assert "--requirement scripts/sglang-cpu.txt" in calls
    assert ".[gpu]" not in calls
    assert setup() == (0, "", "")


def test_setup_on_a_gpu_with_a_new_driver_installs_the_cuda_packages(setup):
    status, words, calls = setup(gpu=H100)
    assert status == 0, words
    assert "found NVIDIA Pretended, compute capability 9.0, driver 580.65.06, glibc 2.34" in words
    assert "--constraint constraints.txt --editable .[gpu]" in calls
    assert "sglang-cpu.txt" not in calls


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"DRIVER": "575.57.08"}, "need a driver >= 580, found 575.57.08; update the driver"),
        ({"DRIVER": "99.1"}, "need a driver >= 580, found 99.1"),
        ({"GLIBC": "2.31"}, "needs glibc >= 2.34 (Ubuntu 22.04, Debian 12, RHEL 9), found 2.31; use a newer system"),
        ({"GLIBC": "none"}, "needs glibc >= 2.34 (Ubuntu 22.04, Debian 12, RHEL 9), found none"),
        ({"CAPABILITY": "7.0"}, "need a GPU of compute capability >= 7.5 (Turing), found 7.0"),
    ],
    ids=["old driver", "very old driver", "old glibc", "another libc", "old GPU"],
)
def test_setup_refuses_a_gpu_that_cuda_13_cannot_use_before_any_download(setup, found, message):
    status, words, calls = setup(gpu=H100 | found)
    assert status == 1
    assert message in words
    assert "NEED_CUDA=0 installs for the CPU" in words
    assert calls == ""


def test_setup_accepts_an_older_driver_if_its_libcuda_supports_cuda_13(setup):
    status, words, calls = setup(gpu=H100 | {"DRIVER": "535.104.05", "LIBCUDA": "new"})
    assert status == 0, words
    assert ".[gpu]" in calls


@pytest.mark.skipif(shutil.which("cc") is None, reason="the test compiles a libcuda with cc")
@pytest.mark.parametrize(("result", "version", "is_enough"), [(0, 13000, True), (0, 12080, False), (803, 13000, False)])
def test_setup_checks_the_libcuda_that_processes_load(tmp_path, result, version, is_enough):
    initialize = f"int cuInit(unsigned flags) {{ return {result}; }}"
    version_of = f"int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}"
    (tmp_path / "cuda.c").write_text(f"{initialize}\n{version_of}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "cuda.c"], check=True)
    text = (ROOT / "scripts" / "setup.sh").read_text()
    function = text[text.index("supports_cuda_13()") : text.index("find_device()")]
    done = subprocess.run(
        ["bash", "-c", f"{function}\nsupports_cuda_13"], env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    )
    assert (done.returncode == 0) == is_enough


def test_setup_refuses_a_machine_whose_gpus_cannot_be_listed(setup, tmp_path):
    status, words, calls = setup(NVIDIA_DEVICE=str(tmp_path))
    assert (status, calls) == (1, "")
    assert "but nvidia-smi is not on PATH" in words
    assert setup(NVIDIA_DEVICE=str(tmp_path), NEED_CUDA="0")[0] == 0


def test_setup_names_all_components_that_are_too_old(setup):
    words = setup(gpu={"DRIVER": "535.1", "CAPABILITY": "7.0", "GLIBC": "2.28"})[1]
    assert all(part in words for part in ("found 535.1", "found 7.0", "found 2.28"))


def test_setup_with_cuda_switched_off_installs_for_the_cpu_on_an_old_driver(setup):
    status, words, calls = setup(gpu=H100 | {"DRIVER": "535.1"}, NEED_CUDA="0")
    assert status == 0, words
    assert "sglang-cpu.txt" in calls


def test_setup_without_sglang_does_not_check_its_glibc(setup):
    status, words, calls = setup(gpu=H100 | {"GLIBC": "2.31"}, NEED_SGLANG="0")
    assert status == 0, words
    assert "sglang" not in calls


def test_setup_says_why_it_installs_for_the_cpu_when_nvidia_smi_fails(setup):
    status, words, calls = setup(gpu=H100 | {"DRIVER": "none"})
    assert status == 0, words
    assert "finds no GPU, so setup installs for the CPU; nvidia-smi says: NVIDIA-SMI has failed" in words
    assert "sglang-cpu.txt" in calls


def test_setup_replaces_cpu_packages_on_a_gpu_and_keeps_cuda_packages_without_a_gpu(setup):
    setup()
    assert ".[gpu]" in setup(gpu=H100)[2]
    assert setup(gpu={"DRIVER": "none"})[2] == ""


def test_two_concurrent_setups_in_one_folder_install_once(setup):
    with ThreadPoolExecutor() as threads:
        ended = [threads.submit(setup, PIP_S="0.3") for _ in range(2)]
        results = [future.result() for future in ended]
    assert [status for status, _, _ in results] == [0, 0]
    assert sum(words.count("installing torch") for _, words, _ in results) == 1


def test_setup_releases_its_lock_before_the_tests_or_the_run(setup):
    status, words, _ = setup(after="flock --nonblock pyproject.toml cat /dev/null")
    assert status == 0, words


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_setup_accepts_each_supported_python(setup, minor):
    status, words, _ = setup(minor=minor)
    assert status == 0, words
    assert f"making .venv with Python 3.{minor}.0" in words


@pytest.mark.parametrize("minor", [10, 14])
def test_setup_installs_python_with_uv_if_path_has_no_supported_python(setup, minor):
    status, words, calls = setup(minor=minor, has_uv=True)
    assert status == 0, words
    assert "making .venv with a Python 3.12 from uv" in words
    assert "uv venv --quiet --seed --python 3.12 .venv" in calls


def test_setup_without_python_or_uv_names_the_found_version(setup):
    status, words, calls = setup(minor=10)
    assert status == 1
    assert "Python 3.11, 3.12 or 3.13 is needed, and PATH has Python 3.10.0; install one, or uv" in words
    assert calls == ""


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        pin.name.lower().replace("_", "-"): pin
        for pin in map(Requirement, filter(lambda line: line[:1].isalnum(), lines))
    }


def test_constraints_pin_each_package_once_to_one_version():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1].isalnum()]
    assert len(pins()) == len(lines)
    assert all(len(pin.specifier) == 1 and str(pin.specifier).startswith("==") for pin in pins().values())


def test_constraints_allow_the_cuda_packages_of_sglang():
    assert pins()["numpy"].specifier.contains("2.3.5")  # mistral-common needs numpy < 2.4
    assert pins()["protobuf"].specifier.contains("6.33.6")  # nvidia-cutlass-dsl needs protobuf < 7


def test_the_gpu_extra_has_only_packages_with_wheels_and_respects_the_pins():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = [Requirement(line) for line in extras["gpu"]]
    assert {need.name for need in needed} == {"sglang", "httptools", "flash-attn-4"}, "flash-attn has no wheels"
    pin = str(pins()["flash-attn-4"].specifier).removeprefix("==")
    assert all(need.specifier.contains(pin, prereleases=True) for need in needed if need.name == "flash-attn-4")
