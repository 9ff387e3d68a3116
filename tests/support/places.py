"""Paths of the parts of this repository that tests read, and of the launcher."""

import sysconfig
from pathlib import Path

SUPPORT = Path(__file__).parent
"""Folder of the modules that tests' processes import by PYTHONPATH."""
ROOT = SUPPORT.parents[1]
CONFIGS = ROOT / "accelerate_configs"
STORED_RUNS = SUPPORT.parent / "stored_runs"
"""A folder per version: a model, a stopped run, the metrics and weights of the run that was not stopped, and a task."""


def launcher(yaml: str, *flags: str) -> list[str]:
    """The words of a real launch under a shipped yaml at any free port; also where the environment is not activated."""
    program = Path(sysconfig.get_path("scripts"), "accelerate-launch")
    return [str(program), "--config_file", str(CONFIGS / f"{yaml}.yaml"), "--main_process_port", "0", *flags]
