#!/usr/bin/env bash
# Puts torch for this machine, accel_sft and its tasks into .venv. Safe to run again: the second time takes a moment.
# PYTHON=python3.12 chooses another interpreter. The user's own environment, active or not, is left alone.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

TORCH_VERSION=2.13.0
TORCH_INDEX=https://download.pytorch.org/whl
TORCH_DRIVER=580 # the oldest NVIDIA driver for what PyPI holds of that version (CUDA 13)
TORCH_OLDER=cu126 # the build for drivers from 560 on
PYTHON=${PYTHON:-python3}
VENV=$PWD/.venv
# a user's pip settings that send packages elsewhere than into the environment
unset PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
# DeepSpeed compiles what a run needs when it needs it, and asks for no CUDA toolkit while it is installed
export DS_BUILD_OPS=0 DS_IGNORE_CUDA_DETECTION=1

say() { printf '%s\n' "setup: $*"; }
fail() { printf '%s\n' "setup: $*" >&2; exit 1; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check install -qq --no-compile --progress-bar off "$@"; }
has_gpu() { [[ -e /proc/driver/nvidia/version ]] || { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }; }
# the driver's major version; nothing if it does not say
driver() { nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n '1s/^\([0-9][0-9]*\)\..*/\1/p' || true; }
# torch of one build ("cpu", "cu126"): the usual index holds none of them; a mirror or a wheel folder of one's own may
pip_torch() {
    pip "torch==$TORCH_VERSION+$1" 2>/dev/null || pip "torch==$TORCH_VERSION+$1" --extra-index-url "$TORCH_INDEX/$1"
}

command -v "$PYTHON" >/dev/null || fail "$PYTHON not found; install Python 3.11 or newer (Debian: apt install python3 python3-venv python3-dev)"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$PYTHON" -V 2>&1) is too old; install 3.11 or newer, or name one: PYTHON=python3.12 bash setup.sh"
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PYTHON=$("$PYTHON" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)') # of an active one
"$PYTHON" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
    say "warning: the headers of Python $version are missing, without which no offload runs (Debian: apt install python$version-dev)"
command -v g++ >/dev/null ||
    say "warning: no C++ compiler (g++), without which no offload runs (Debian: apt install g++)"
if [[ -n ${VIRTUAL_ENV:-} && $VIRTUAL_ENV != "$VENV" ]]; then
    say "the active environment $VIRTUAL_ENV is left as it is; accel_sft goes to $VENV"
fi

device=cpu driver=$TORCH_DRIVER
if has_gpu; then device=gpu driver=$(driver); driver=${driver:-$TORCH_DRIVER}; fi
# what the environment was made from: when it is unchanged, there is nothing to do
state=$(cksum setup.sh pyproject.toml tasks/*/pyproject.toml && printf "%s %s %s\n" "$VENV" "$version" "$device")
installed() {
    [[ -x $VENV/bin/python && -f $VENV/setup-state && $(<"$VENV/setup-state") == "$state" ]] &&
        "$VENV/bin/python" -c '
from importlib.metadata import version
for name in ("torch", "deepspeed", "pytest", "accel-sft", "accel-sft-chat", "accel-sft-math", "accel-sft-ner"):
    version(name)' 2>/dev/null
}
if installed; then
    say "everything is installed in $VENV"
    exit 0
fi

# scripts in an environment hold its path and its Python: one of ours that was moved, or broken off, is made anew
usable() { "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }
if [[ -f $VENV/made-for ]] && ! { [[ $(<"$VENV/made-for") == "$VENV $version" ]] && usable; }; then
    rm -rf "$VENV"
elif [[ -e $VENV ]] && ! usable; then
    fail "$VENV is not one that setup.sh made, and has no working pip; move it away"
fi
if [[ ! -e $VENV ]]; then
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "Python $version cannot make environments (Debian: apt install python$version-venv)"
    say "making $VENV with Python $version"
    mkdir "$VENV"
    printf '%s' "$VENV $version" >"$VENV/made-for"
    "$PYTHON" -m venv "$VENV"
fi

if ! "$VENV/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    if [[ $device == cpu && $(uname -sm) == "Linux x86_64" ]]; then
        say "installing torch $TORCH_VERSION, CPU build (no NVIDIA GPU here)"
        pip_torch cpu || fail "torch could not be installed; see pip's message above"
    elif [[ $device == gpu && $driver -lt $TORCH_DRIVER ]]; then
        say "installing torch $TORCH_VERSION for CUDA 12.6 (the NVIDIA driver is $driver; the usual build needs $TORCH_DRIVER)"
        pip_torch "$TORCH_OLDER" || fail "torch could not be installed; see pip's message above, or update the NVIDIA driver"
    else
        say "installing torch $TORCH_VERSION"
        pip "torch==$TORCH_VERSION" || fail "torch could not be installed; see pip's message above"
    fi
fi

say "installing accel_sft, its tasks and what they need (a minute or a few)"
pip -e ".[test]" -e tasks/chat -e tasks/math -e tasks/ner || fail "the installation failed; see pip's message above"
# pip would do it on one core; as it does, files that this Python cannot read are passed over: some libraries have them
"$VENV/bin/python" -W ignore -m compileall -qq -j 0 "$VENV/lib" || true
printf '%s' "$state" >"$VENV/setup-state"
say "done; the programs are in $VENV/bin"
