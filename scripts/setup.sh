#!/usr/bin/env bash
# Makes .venv and installs the pinned dependencies into it; at once when nothing has changed since the last time.
# Sourced by run_async.sh and test.sh from the repository root. Option: NEED_SGLANG=0 before sourcing goes on without SGLang.

VENV=.venv
SETUP_LOG=$VENV/setup.log
CONSTRAINTS=(--constraint constraints.txt)

say() { printf 'setup: %s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "Python 3.11 or 3.12 is needed and none is on PATH; install one and run this again"
    return 1
}

pip_install() { # pip_install "what it is, in words" pip-arguments...
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
    if [ ! -x "$VENV/bin/python" ]; then
        local python
        python=$(find_python) || return 1
        say "making $VENV with $("$python" --version) ($python)"
        "$python" -m venv "$VENV" || return 1
    fi
    : >"$SETUP_LOG"
    pip_install "torch 2.13.0" torch==2.13.0 || return 1
    pip_install "asyncrl, Ray, transformers and the tools" "${CONSTRAINTS[@]}" --editable '.[dev]' || return 1
}

install_sglang() {
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        pip_install "SGLang 0.5.21 with CUDA" "${CONSTRAINTS[@]}" sglang==0.5.21
    else
        pip_install "what SGLang needs on a CPU" "${CONSTRAINTS[@]}" --requirement scripts/sglang-cpu.txt &&
            pip_install "SGLang 0.5.21 for the CPU" --no-deps sglang==0.5.21 torchvision==0.16.2
    fi
}

fingerprint() { cat "$@" | sha256sum | cut -d ' ' -f 1; }

up_to_date() { [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/.$1" 2>/dev/null)" = "$2" ]; }

setup() {
    local base sglang
    base=$(fingerprint pyproject.toml constraints.txt scripts/setup.sh)
    if ! up_to_date base "$base"; then
        install_base || return 1
        echo "$base" >"$VENV/.base"
    fi
    sglang=$(fingerprint constraints.txt scripts/sglang-cpu.txt scripts/setup.sh)
    if [ "${NEED_SGLANG:-1}" = 1 ] && ! up_to_date sglang "$sglang"; then
        if ! install_sglang; then
            say "SGLang cannot be installed here; rollout_fleet.engine=transformers trains without it, in process"
            return 1
        fi
        echo "$sglang" >"$VENV/.sglang"
    fi
}

setup || exit 1
