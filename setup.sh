#!/usr/bin/env bash
# Puts torch for this machine, accel_sft and its tasks into .venv. Safe to run again: the second time takes a moment.
# --test adds what the tests, checkers and documentation need.
# DEVICE=gpu or cpu asks for that torch where it is to run elsewhere (a login node, an image), DEVICE=cu126 for a build.
# PYTHON=python3.12 chooses another interpreter. The user's own environment, active or not, is left alone.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

TORCH_VERSION=2.13.0
TORCH_INDEX=https://download.pytorch.org/whl
TORCH_DRIVER=580 # the oldest NVIDIA driver for what PyPI holds of that version (CUDA 13: from Turing on)
TORCH_OLDER=cu126 # the build for drivers from 560 on, and for GPUs before Turing (7.5) whatever their driver; up to Hopper
NVIDIA=/proc/driver/nvidia/version
PYTHON=${PYTHON:-python3}
VENV=$PWD/.venv
# what of a user's settings sends packages elsewhere than into the environment, or keeps Python from writing bytecode
unset PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV PYTHONDONTWRITEBYTECODE
# DeepSpeed compiles what a run needs when it needs it, and asks for no CUDA toolkit while it is installed
export DS_BUILD_OPS=0 DS_IGNORE_CUDA_DETECTION=1

say() { printf '%s\n' "setup: $*"; }
fail() { printf '%s\n' "setup: $*" >&2; exit 1; }
python() { "$VENV/bin/python" -W ignore "$@"; }
job() { exec "$VENV/bin/python" -W ignore "$@"; } # for the background: its process id is Python's
pip() { python -m pip --disable-pip-version-check install -qq --no-compile --progress-bar off "$@"; }
has_gpu() { [[ -e $NVIDIA ]] || { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }; }
# the driver's major version; nothing if neither nvidia-smi nor the kernel module says it
driver() {
    { nvidia-smi --query-gpu=driver_version --format=csv,noheader; cat "$NVIDIA"; } 2>/dev/null |
        sed -n 's/^\(NVRM version:.* \)\{0,1\}\([0-9]\{3,\}\)\.[0-9.]*\( .*\)\{0,1\}$/\2/p' | sed -n 1p || true
}
# compute capabilities of the GPUs, times ten, lowest first
capabilities() {
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sed -n 's/^\([0-9]*\)\.\([0-9]\)$/\1\2/p' | sort -n || true
}
# the build of torch for this machine: "cpu", "cu126", or "usual", what PyPI has
torch_build() {
    local driver lowest highest
    case ${DEVICE:-} in
        gpu) ;;
        cpu) if [[ $(uname -sm) == "Linux x86_64" ]]; then echo cpu; else echo usual; fi; return ;;
        cu[0-9]*) echo "$DEVICE"; return ;;
        "") has_gpu || { DEVICE=cpu torch_build; return; } ;;
        *) fail "DEVICE=$DEVICE: gpu, cpu or a build of torch, such as $TORCH_OLDER" ;;
    esac
    driver=$(driver) lowest=$(capabilities | sed -n 1p) highest=$(capabilities | sed -n '$p')
    if [[ ${lowest:-75} -lt 75 ]]; then
        echo "$TORCH_OLDER"
    elif [[ ${driver:-$TORCH_DRIVER} -ge $TORCH_DRIVER ]]; then
        echo usual
    elif [[ ${highest:-90} -ge 100 ]]; then
        fail "the NVIDIA driver is $driver; torch $TORCH_VERSION needs $TORCH_DRIVER for this GPU: update it, or DEVICE=cpu bash setup.sh"
    else
        echo "$TORCH_OLDER"
    fi
}
# torch of one build ("cpu", "cu126"): the usual index holds none of them; a mirror or a wheel folder of one's own may
pip_torch() {
    pip "torch==$TORCH_VERSION+$1" 2>/dev/null || pip "torch==$TORCH_VERSION+$1" --extra-index-url "$TORCH_INDEX/$1"
}

case $* in
    "") extras="" ;;
    --test) extras="[test]" ;;
    *) fail "$*: there is one option, --test" ;;
esac

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

build=$(torch_build) || exit 1
# what the environment was made from: when it is unchanged, there is nothing to do
if [[ -f $VENV/setup-state && $(<"$VENV/setup-state") == *" [test]" ]]; then extras="[test]"; fi # once there, it stays
state=$(cksum setup.sh pyproject.toml tasks/*/pyproject.toml && printf "%s %s %s %s\n" "$VENV" "$version" "$build" "$extras")
installed() {
    [[ -x $VENV/bin/python && -f $VENV/setup-state && $(<"$VENV/setup-state") == "$state" ]] &&
        python -c '
import sys
from importlib.metadata import distribution, version
if "editable" not in (distribution("accel-sft").read_text("direct_url.json") or ""):
    sys.exit(1) # a copy, which a changed checkout would not change
for name in ("torch", "deepspeed", "accel-sft", "accel-sft-chat", "accel-sft-math", "accel-sft-ner", *sys.argv[1:]):
    version(name)' ${extras:+pytest} 2>/dev/null
}
if installed; then
    say "everything is installed in $VENV"
    exit 0
fi

# scripts in an environment hold its path and its Python: one of ours that was moved, or broken off, is made anew
usable() { "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }
rmdir "$VENV" 2>/dev/null || true # an empty one: a set-up was ended before it wrote what it is
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

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # a shell's jobs outlive it, and Ctrl-C does not reach them
# the pip that comes with Python 3.11 resolves a third as fast; a folder of wheels may hold no other
pip --upgrade pip "setuptools>=77" 2>/dev/null || pip "setuptools>=77" ||
    fail "setuptools could not be installed; see pip's message above"
# DeepSpeed's wheel, made beside the installation of torch: with torch it would look for a compiler and CUDA
job -m pip --disable-pip-version-check wheel -qq --progress-bar off --no-deps -w "$VENV/wheels" \
    "$(sed -n "s/^ *\"\(deepspeed[<>=].*\)\",$/\1/p" pyproject.toml)" &
wheel=$!
# a torch that is there is kept, unless it is of a build that this machine cannot use or DEVICE rules out
torch=$(python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) || torch=
case "$build $torch" in
    "cpu $TORCH_VERSION"*) if [[ -n ${DEVICE:-} && $torch != *+cpu ]]; then other=yes; fi ;; # one for GPUs has kernels for CPUs
    "cpu "*) ;;
    *+cpu | "usual $TORCH_VERSION+$TORCH_OLDER") other=yes ;;
    "cu"*" $TORCH_VERSION"*) if [[ $torch != *"+$build" ]]; then other=yes; fi ;;
esac
if [[ -n ${other:-} ]]; then
    say "replacing torch $torch by the $build build"
    python -m pip uninstall -qq -y torch
fi
if [[ -z $torch || -n ${other:-} ]]; then
    say "installing torch $TORCH_VERSION, $build build"
    if [[ $build == usual ]]; then pip "torch==$TORCH_VERSION"; else pip_torch "$build"; fi ||
        fail "torch could not be installed; see pip's message above"
fi

# a run's imports, so that each process of it begins with their bytecode: torch's while pip installs the rest
job -c 'import torch._dynamo, torch.distributed.run, torch.utils.cpp_extension' 2>/dev/null &
bytecode=$!
say "installing accel_sft, its tasks and what they need (a minute or a few)"
wait "$wheel" && pip --no-build-isolation --find-links "$VENV/wheels" \
    -e ".$extras" -e tasks/chat -e tasks/math -e tasks/ner || fail "the installation failed; see pip's message above"
wait "$bytecode" || true
job -c 'import deepspeed.launcher.runner, scipy.stats, torch.utils.tensorboard' >/dev/null 2>&1 &
bytecode=$!
python -c '
import accelerate.commands.accelerate_cli, torch.distributed.run
import transformers.generation.utils, transformers.models.auto.tokenization_auto, transformers.models.qwen2.modeling_qwen2
import accel_sft.cli.group, accel_sft.commands.train, accel_sft.training.trainer' >/dev/null 2>&1 || true
wait "$bytecode" || true
if [[ $extras ]]; then # tests import nearly all but these; files that this Python cannot read are passed over
    python -m compileall -qq -j 0 -x '/(tests?|pip|sphinx|babel)/|/transformers/models/' "$VENV/lib" accel_sft tasks || true
fi
rm -rf "$VENV/wheels"
printf '%s' "$state" >"$VENV/setup-state"
say "done; the programs are in $VENV/bin"
