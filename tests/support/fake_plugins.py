"""Installs plugins as pip would (a module and a .dist-info folder in one directory), but in milliseconds."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = '''
from dataclasses import dataclass
from accel_sft import Task, UserError, option

@dataclass(kw_only=True)
class Good(Task):
    """Repeat the number."""
    main_metric = "accuracy"
    size: int = option(10, min=2, max=100, help="How many numbers.")
    style: str = option("plain", choices=("plain", "fancy"), help="Look.", section="Looks")
    shout: bool = option(False, help="Loudly.")
    limit: float | None = option(None, help="A limit.")

    def dataset(self, split):
        return list(range(self.size))

    def messages(self, example):
        return [{"role": "user", "content": str(example)}]

    def target(self, example):
        return str(example)

    def score(self, example, text):
        return {"accuracy": float(text == str(example))}

    def problems(self):
        quiet = self.style == "fancy" and not self.shout
        return super().problems() + (["--style fancy needs --shout"] if quiet else [])
'''


def install(
    site: Path,
    distribution: str,
    entry_points: str,
    source: str = GOOD,
    *,
    module: str | None = None,
    version: str = "1.2",
    requires: tuple[str, ...] = (),
) -> None:
    """Put a distribution into `site`: a module with this code, and the lines of its section `accel_sft.tasks`."""
    module = module or distribution.replace("-", "_")
    (site / f"{module}.py").write_text(source, encoding="utf-8")
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nSummary: {distribution} sums up\n"
    about += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    (info / "METADATA").write_text(about, encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[accel_sft.tasks]\n{entry_points}\n", encoding="utf-8")


@contextlib.contextmanager
def only_plugins_of(site: Path, monkeypatch: pytest.MonkeyPatch):
    """While inside, this process sees only the plugins in `site`; their modules are forgotten afterwards."""
    find = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: find(path=[str(site)]))
    monkeypatch.syspath_prepend(site)
    yield site
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(site)):
            del sys.modules[name]


def accel_sft(*arguments: str, site: Path | None = None, env: dict[str, str] | None = None, cwd: Path | None = None):
    """Run the command line in a separate process, with the plugins in `site` installed."""
    path = os.pathsep.join(filter(None, (str(site or ""), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **(env or {})}
    command = [sys.executable, "-m", "accel_sft", *arguments]
    return subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, encoding="utf-8", check=False
    )
