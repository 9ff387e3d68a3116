"""Real launches, run once per session. Without torch: pytest -n reads this file before it starts its workers."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import pickle
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import forked
import pytest
from filelock import FileLock
from packaging.version import Version
from places import CONFIGS, SUPPORT

pytest_plugins = ["overdue", "shared_fixtures", "launches"]
collect_ignore = ["stored_runs"]  # the test of a stored task is run by the test of ours
pytest.register_assert_rewrite("launches", "reference_job", "stopping", "parsers", "planted")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as for all that a script puts into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what tests start inherits the default
FOREIGN = r"ACCEL|FSDP_|SLURM_|TORCHELASTIC_|HF_TOKEN|(FORCE|NO)_COLOR|COLUMNS|LINES|(LOCAL_)?(RANK|WORLD_SIZE)$"
if "PYTEST_CURRENT_TEST" not in os.environ:  # a process that a test starts has what the test gave it
    for name in [name for name in os.environ if re.match(FOREIGN, name)]:
        del os.environ[name]  # of the user's terminal, account and jobs
os.environ["TERM"] = "xterm-256color"
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # GPUs have tests of their own: tests/gpu/run
if os.environ.get("PLANTED_BF16") == "none":  # a CPU with AVX2 and no more, also for the kernels of torch
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
if (every_process := str(SUPPORT / "every_process")) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (every_process, os.environ.get("PYTHONPATH"))))
    runpy.run_path(f"{every_process}/sitecustomize.py")
if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: two workers' threads would spin for the same cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
from launches import Launched  # noqa: E402 - what is planted and registered comes before it

AS_COUNTED = pytest.mark.skipif(
    Version(importlib.metadata.version("torch")) < Version("2.13"),
    reason="predicted memory was counted on torch 2.13; older ones keep more",
)
gc.disable()  # what test modules import stays: collections amid it would be a quarter of the collection of tests


def pytest_collection_finish():
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def common(tmp_path_factory):
    """A folder that pytest-xdist's workers have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def cache(common):
    """What the tests keep is not the user's, and is gone with them."""
    folder = common / "cache"
    folder.mkdir(exist_ok=True, mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCEL_SFT_CACHE", str(folder))
        # its kernels are of the CPU that is planted: on another kind they crash
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield folder


def accel_sft(
    *arguments: str,
    yaml: str | None = None,
    torchrun: tuple[str, ...] = (),
    launcher: tuple[str, ...] = (),
    run_dir: Path | None = None,
    environment: dict[str, str] | None = None,
    module: str = "accel_sft",
    real: bool = False,
) -> Launched:
    """Run the command line as a user would: under `accelerate launch` with one of the shipped yamls, or alone.

    Args:
        torchrun: the flags of a launch by it, in place of a yaml.
        real: whether launcher and ranks are processes of their own that import what they need, and not forks with all
            of it imported (forked.py): for what is about launchers, signals, kills and ranks that are lost.
    """
    given = (*arguments, "--output-dir", str(run_dir)) if run_dir else arguments
    env = {**os.environ, "COLUMNS": "100", **(environment or {})}
    if environment and "PYTHONPATH" in environment:  # the caller's stays beside it
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (environment["PYTHONPATH"], os.environ.get("PYTHONPATH"))))
    command = ("accel_sft", *given)
    if yaml:
        command = (forked.LAUNCH, "--config_file", str(CONFIGS / f"{yaml}.yaml"), "--main_process_port", "0")
        command += (*launcher, "-m", module, *given)
    if torchrun:
        command = (forked.TORCHRUN, *torchrun, "-m", module, *given)
    if (yaml or torchrun) and real:
        # `accelerate launch` by its other name, which does not import what all other commands need
        command = (str(Path(sysconfig.get_path("scripts"), command[0])), *command[1:])
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    else:
        with tempfile.TemporaryDirectory() as folder:
            done = forked.run(command, env, Path(folder))
    again = {"yaml": yaml, "torchrun": torchrun, "launcher": launcher, "module": module, "real": real}
    return Launched(run_dir or Path(), done.returncode, done.stdout + done.stderr, arguments, again)


def finished(*arguments: str, **options) -> Launched:
    """A launch, as by `accel_sft`, that ends with status 0."""
    run = accel_sft(*arguments, **options)
    assert run.status == 0, run.output[-6000:]
    return run


@pytest.fixture
def called(monkeypatch, capfd):
    """`called(...)`: a command line in this process, for what ends before it computes: a refusal, a report, a plan."""
    with capfd.disabled():
        import deepspeed  # noqa: F401 - its first import prints a line, to a stream that its logger keeps

    from accel_sft.__main__ import main

    monkeypatch.setattr("accel_sft.launch.environment.prepare_environment", lambda debug=False: None)

    def call(*arguments: str, run_dir: Path | None = None) -> Launched:
        given = (*arguments, "--output-dir", str(run_dir)) if run_dir else arguments
        monkeypatch.setattr(sys, "argv", ["accel-sft", *given])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as ended:
            main()
        return Launched(run_dir or Path(), ended.value.code, "".join(capfd.readouterr()), arguments, {})

    return call


def stopped(whole, folder, step):
    """A copy of a run as it was when the checkpoint of this step was its newest."""
    shutil.copytree(whole.run_dir, folder)
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    shutil.rmtree(folder / "final")
    (folder / "result.json").write_text('{"status": "running"}')
    return folder


@pytest.fixture(scope="session")
def launched(common):
    """`launched(name, ...)`: the launch of that name, made on first use, by whichever worker, with the arguments given
    then."""
    runs = common / "runs"
    runs.mkdir(exist_ok=True)

    def launch(name: str, *arguments: str, expect: int = 0, **options) -> Launched:
        with FileLock(runs / f"{name}.lock"):
            if not (record := runs / f"{name}.pickle").exists():
                options.setdefault("run_dir", runs / name)
                record.write_bytes(pickle.dumps(accel_sft(*arguments, **options)))
            made = pickle.loads(record.read_bytes())
        assert made.status == expect, f"{name} ended with {made.status}:\n{made.output[-6000:]}"
        return made

    return launch
