"""A script for one rank, which adds up numbers with the other ranks (an all-reduce) and prints JSON after each step."""

import json
import os
import signal
import sys

from accel_sft.api.errors import first_line

ELEMENTS = 1 << 20
"""How many numbers each rank gives to be added up."""
FAILED = 1
"""The exit status of a rank that has printed why it failed."""


def tell(step: str, trouble: str = "") -> None:
    print(json.dumps({"step": step, "trouble": trouble}), flush=True)


def main(backend: str, seconds: int) -> None:
    import datetime

    import torch
    from torch import distributed

    tell("imported torch")
    signal.alarm(seconds)  # SIGALRM's default action ends this process even while it waits in C++
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        distributed.init_process_group(backend, timeout=datetime.timedelta(seconds=2 * seconds))
        tell("joined the others")
        device = "cuda" if backend == "nccl" else "cpu"
        numbers = torch.full((ELEMENTS,), float(rank + 1), device=device)
        distributed.all_reduce(numbers)
        right = bool((numbers == ranks * (ranks + 1) / 2).all())
        distributed.barrier()
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        tell("failed", first_line(error))
        sys.exit(FAILED)
    tell("done" if right else "failed", "" if right else "the sum is wrong")
    os._exit(0)  # destroying the group holds the GIL until gloo's threads end, and they may wait for the GIL


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
