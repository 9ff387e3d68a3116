"""The launch files that come with the package."""

from pathlib import Path

import accel_sft

FOLDER = Path(accel_sft.__file__).parent / "launch_files"
"""Package data; in a checkout a link to accelerate_configs/."""


def shipped() -> dict[str, Path]:
    """Every shipped launch file, by its name without .yaml, in alphabetical order."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
