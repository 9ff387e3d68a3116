"""What survivors say of a rank that is gone, by how it ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LAUNCHER = """
import os, subprocess, sys

ranks = [
    subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": str(rank + 4), "LOCAL_RANK": str(rank)})
    for rank, code in enumerate(sys.argv[1:])
]
ranks[0].wait()  # whoever reaps the other takes away how it ended
"""
SURVIVOR = """
import sys, time
from pathlib import Path
import psutil
from accel_sft.resilience.ranks import lost_ranks

other = [p for p in psutil.Process().parent().children() if p.pid != psutil.Process().pid]
while any(p.status() != psutil.STATUS_ZOMBIE for p in other):
    time.sleep(0.02)
print(lost_ranks(Path("ATTEMPT")))
"""
KILLED = "import os; os.kill(os.getpid(), {})"


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (KILLED.format(9), "rank 5 was killed (signal 9, as the system does when memory runs out); host memory now: "),
        (KILLED.format(11), "rank 5 was ended by SIGSEGV; its output, if any, is in the run's logs"),
        (KILLED.format(6), "rank 5 was ended by SIGABRT"),
        ("pass", "rank 5 ended without an error message"),
        ("from pathlib import Path; Path('ATTEMPT/1/error.json').write_text('{}')", ""),
    ],
)
def test_a_rank_that_is_gone_is_explained_by_how_it_ended(tmp_path, ends, told):
    (tmp_path / "1").mkdir()
    codes = [code.replace("ATTEMPT", str(tmp_path)) for code in (SURVIVOR, ends)]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *codes], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(told), done.stderr
    assert bool(done.stdout.strip()) == bool(told)
