"""Prints pyproject.toml's dependencies: for `lowest` each at its lower bound (`torch==2.6`), for `newest` their names.

Run it by an environment's Python: it needs nothing but that environment's pip.
"""

import sys
import tomllib
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
for line in project["dependencies"]:
    requirement = Requirement(line)
    lowest = [bound.version for bound in requirement.specifier if bound.operator in (">=", "==", "~=")]
    if len(lowest) != 1:
        sys.exit(f"pyproject.toml: {line!r} has no lower bound; write one: {requirement.name}>=VERSION")
    print(requirement.name if sys.argv[1] == "newest" else f"{requirement.name}=={lowest[0]}")
