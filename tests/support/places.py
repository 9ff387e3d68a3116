"""Paths of the parts of this repository that tests read."""

from pathlib import Path

SUPPORT = Path(__file__).parent
"""Folder of the modules that tests' processes import by PYTHONPATH."""
ROOT = SUPPORT.parents[1]
CONFIGS = ROOT / "accelerate_configs"
STORED_RUNS = SUPPORT.parent / "stored_runs"
"""A folder per version: a model, a stopped run, the metrics and weights of the run that was not stopped, and a task."""
