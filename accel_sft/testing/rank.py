"""One rank of the conformance kit: reads a pickled task from standard input, writes what it observes as JSON."""

import json
import os
import pickle
import sys

if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)  # what the task prints goes to standard error, in its order there
        sys.stdout = sys.stderr
        sys.path[:] = pickle.load(sys.stdin.buffer)["path"]
        from accel_sft.testing.observed import observed

        task, most = pickle.load(sys.stdin.buffer)
        json.dump({split: observed(task, split, most) for split in ("train", "validation")}, answer)
