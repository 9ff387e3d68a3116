"""Where the parts of this repository are that tests read."""

from pathlib import Path

SUPPORT = Path(__file__).parent
"""Modules that processes of tests import, by PYTHONPATH."""
ROOT = SUPPORT.parents[1]
CONFIGS = ROOT / "accelerate_configs"
STORED_RUNS = SUPPORT.parent / "stored_runs"
