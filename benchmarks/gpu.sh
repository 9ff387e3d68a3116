#!/usr/bin/env bash
# Speed and memory on this machine's NVIDIA GPU, from a bare checkout and without network; see benchmarks/gpu.py.
# PYTHON names an interpreter with torch, transformers, accelerate, deepspeed, peft and tensorboard (default: .venv, as
# setup.sh makes it, or python3); accel_sft itself is taken from this checkout. Arguments are passed to gpu.py.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

if [[ -z ${PYTHON:-} ]]; then
    if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
"$PYTHON" -c 'import importlib.util, sys
needed = "torch transformers accelerate deepspeed peft tensorboard click psutil rich safetensors tokenizers yaml"
missing = [name for name in needed.split() if importlib.util.find_spec(name) is None]
sys.exit(f"{sys.executable} has no {chr(44).join(missing)}; name another in PYTHON, or run setup.sh" if missing else 0)'
exec "$PYTHON" benchmarks/gpu.py "$@"
