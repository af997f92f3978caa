#!/usr/bin/env bash
# Makes .venv and installs the pinned dependencies into it. Does nothing if nothing has changed since the last setup.
# The other scripts source this script from the repository root.
# On a machine with an NVIDIA GPU, the script checks that the CUDA wheels can run before it downloads them.
# Options, to be set before sourcing:
#   NEED_SGLANG=0  do not install SGLang
#   NEED_CUDA=0    install for the CPU even if there is a GPU

VENV=.venv
SETUP_LOG=$VENV/setup.log
CONSTRAINTS=(--constraint constraints.txt)
MIN_DRIVER=580       # for CUDA 13; the wheels of torch 2.13.0 and SGLang are built with CUDA 13
MIN_GLIBC=2.34       # the platform tag of SGLang's wheel
MIN_CAPABILITY=7.5   # CUDA 13 cannot compile for older GPUs
NVIDIA_DEVICE=${NVIDIA_DEVICE:-/dev/nvidiactl}  # exists if processes can open NVIDIA GPUs

say() { printf 'setup: %s\n' "$*" >&2; }

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

make_venv() {
    local candidate python
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        python=$(command -v "$candidate") && is_supported "$python" || continue
        say "making $VENV with $("$python" --version) ($python)"
        "$python" -m venv "$VENV" && return
        rm -rf "$VENV"  # without python3-venv, Debian's python3 creates an environment that has no pip
        say "$python cannot make an environment with pip; on Debian and Ubuntu, install $candidate-venv"
        return 1
    done
    if command -v uv >/dev/null 2>&1; then
        say "there is no Python 3.11, 3.12 or 3.13 on PATH; making $VENV with a Python 3.12 from uv"
        uv venv --quiet --seed --python 3.12 "$VENV"
        return
    fi
    say "Python 3.11, 3.12 or 3.13 is needed, and PATH has $(python3 --version 2>&1 || echo none); install one, or uv"
    return 1
}

at_least() { printf '%s\n%s\n' "$2" "$1" | sort --check=quiet --version-sort; } # at_least VERSION LEAST

supports_cuda_13() { # Whether libcuda supports CUDA 13. It can be newer than the driver (package cuda-compat-13-0).
    local python
    read -r python < <(command -v python3 python3.11 python3.12 python3.13) && "$python" - 2>/dev/null <<'END'
import ctypes
cuda, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
raise SystemExit(cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version)) or version.value < 13000)
END
}

find_device() { # Sets DEVICE to cuda or cpu. Fails if there is a GPU that the CUDA wheels cannot use.
    local gpu name driver capability glibc failed=0
    DEVICE=cpu
    [ "${NEED_CUDA:-1}" = 1 ] || return 0
    if ! command -v nvidia-smi >/dev/null 2>&1; then
        [ -e "$NVIDIA_DEVICE" ] || return 0
        say "this machine has NVIDIA GPUs ($NVIDIA_DEVICE exists), but nvidia-smi is not on PATH; install nvidia-smi, or" \
            "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility; NEED_CUDA=0 installs for the CPU"
        return 1
    fi
    if ! gpu=$(nvidia-smi --query-gpu=driver_version,compute_cap,name --format=csv,noheader 2>&1) || [ -z "$gpu" ]; then
        say "nvidia-smi finds no GPU, so setup installs for the CPU; nvidia-smi says: ${gpu%%$'\n'*}"
        return 0
    fi
    DEVICE=cuda
    IFS=, read -r driver capability name <<<"$gpu"
    capability=${capability// /}
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null) && glibc=${glibc#glibc } || glibc=none
    say "found${name}, compute capability $capability, driver $driver, glibc $glibc"
    if ! at_least "$driver" "$MIN_DRIVER" && ! supports_cuda_13; then
        say "the CUDA 13 wheels need a driver >= $MIN_DRIVER, found $driver; update the driver of the host, or, on a" \
            "data center GPU, install cuda-compat-13-0 and add its folder to LD_LIBRARY_PATH"
        failed=1
    fi
    if ! at_least "$capability" "$MIN_CAPABILITY"; then
        say "the CUDA 13 wheels need a GPU of compute capability >= $MIN_CAPABILITY (Turing), found $capability"
        failed=1
    fi
    if [ "${NEED_SGLANG:-1}" = 1 ] && { [ "$glibc" = none ] || ! at_least "$glibc" "$MIN_GLIBC"; }; then
        say "SGLang's wheel needs glibc >= $MIN_GLIBC (Ubuntu 22.04, Debian 12, RHEL 9), found $glibc; use a newer system or container"
        failed=1
    fi
    [ $failed = 0 ] && return
    say "nothing was downloaded; NEED_CUDA=0 installs for the CPU: run with learner.device=cpu rollout_fleet.device=cpu"
    return 1
}

pip_install() { # pip_install "description for messages" pip-arguments...
    local words=$1 began=$SECONDS
    shift
    say "installing $words ..."
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet "$@" >>"$SETUP_LOG" 2>&1; then
        grep -v '^WARNING' "$SETUP_LOG" | tail -n 15 >&2
        say "could not install $words; the whole log is in $SETUP_LOG"
        return 1
    fi
    say "installed $words in $((SECONDS - began)) s"
}

install_base() {
    [ -x "$VENV/bin/python" ] || make_venv || return 1
    if ! is_supported "$VENV/bin/python"; then
        say "$VENV has $("$VENV/bin/python" --version), and Python 3.11, 3.12 or 3.13 is needed; remove $VENV"
        return 1
    fi
    : >"$SETUP_LOG"
    pip_install "torch 2.13.0" "${CONSTRAINTS[@]}" torch==2.13.0 || return 1
    pip_install "asyncrl, Ray, transformers and the tools" "${CONSTRAINTS[@]}" --editable '.[dev]' || return 1
}

# SGLang imports torchvision, but does not call torchvision for text.
# torchvision 0.16.2 can be imported with any build of torch, because it ignores a compiled part that does not fit.
# torchvision 0.16.2 has no wheel for Python 3.13. So Python 3.13 gets the torchvision for torch 2.13.0.
torchvision_version() { "$VENV/bin/python" -c 'import sys; print("0.28.0" if sys.version_info >= (3, 13) else "0.16.2")'; }

install_sglang() {
    if [ "$DEVICE" = cuda ]; then
        pip_install "SGLang 0.5.21 with CUDA, several GB" "${CONSTRAINTS[@]}" --editable '.[gpu]'
    else
        pip_install "what SGLang needs on a CPU" "${CONSTRAINTS[@]}" --requirement scripts/sglang-cpu.txt &&
            pip_install "SGLang 0.5.21 for the CPU" --no-deps sglang==0.5.21 "torchvision==$(torchvision_version)"
    fi
}

fingerprint() { cat "$@" | sha256sum | cut -d ' ' -f 1; }

up_to_date() { [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/.$1" 2>/dev/null)" = "$2" ]; }

setup() {
    local base sglang
    base=$(fingerprint pyproject.toml constraints.txt scripts/setup.sh)
    sglang=$(fingerprint pyproject.toml constraints.txt scripts/sglang-cpu.txt scripts/setup.sh)
    # An environment with CUDA also works on a node without a GPU. An environment for the CPU does not work with a GPU.
    if up_to_date base "$base" && { [ "${NEED_SGLANG:-1}" != 1 ] || up_to_date sglang "cuda $sglang"; }; then
        return
    fi
    find_device || return 1
    if ! up_to_date base "$base"; then
        install_base || return 1
        echo "$base" >"$VENV/.base"
    fi
    if [ "${NEED_SGLANG:-1}" = 1 ] && ! up_to_date sglang "$DEVICE $sglang"; then
        if ! install_sglang; then
            say "SGLang cannot be installed here; rollout_fleet.engine=transformers trains without it, in process"
            return 1
        fi
        echo "$DEVICE $sglang" >"$VENV/.sglang"
    fi
}

setup_alone() { # Runs one setup at a time, because tests and a run may start in the same folder at the same time.
    local lock status
    exec {lock}<pyproject.toml && flock "$lock" || return 1
    setup
    status=$?
    exec {lock}<&-
    return $status
}

setup_alone || exit 1
