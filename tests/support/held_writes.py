"""The command line, with a checkpoint at whose files something happens once steps have gone on behind it.

    python -m held_writes kill|SIGTERM|full|best|full-best STEP AFTER math ...

The files of the checkpoint of STEP are begun when metrics.jsonl has the step AFTER. Then the last rank is killed amid
its files, gets the signal before them, or finds the disk full. With `best`, rank 0 is killed before the best/ of STEP
is in its place, and with `full-best` it finds the disk full.
"""

# ruff: noqa: E402, the environment comes before torch

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

from limits import wait_for
from stopping import steps_done

from accel_sft.launch.environment import prepare_environment

prepare_environment()

from accel_sft.__main__ import main
from accel_sft.checkpoint import checkpoint, shards

what, step, after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
del sys.argv[1:4]
write, put_in_place = shards.write, checkpoint.put_in_place


def held(pieces, folder: Path, rank: int, **options):
    if "best" in what or folder.name != f".step-{step:06d}.partial":
        return write(pieces, folder, rank, **options)
    wait_for(lambda: steps_done(folder.parents[1]) >= after)
    last = rank == int(os.environ.get("WORLD_SIZE", "1")) - 1
    if what == "full" and last:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if what == "SIGTERM" and last:
        os.kill(os.getpid(), signal.SIGTERM)
    files = write(pieces, folder, rank, **options)
    if what == "kill" and last:
        os.kill(os.getpid(), signal.SIGKILL)
    return files


def held_best(partial: Path, target: Path):
    if "best" in what and target.name == "best" and f"of step {step}" in (partial / "README.md").read_text():
        wait_for(lambda: steps_done(target.parent) >= after)
        if what == "best":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    put_in_place(partial, target)


shards.write, checkpoint.put_in_place = held, held_best
main()
