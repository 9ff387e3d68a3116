"""One rank of the conformance kit: reads a pickled task from standard input, writes what it observes as JSON."""

import json
import pickle
import sys

if __name__ == "__main__":
    sys.path[:] = pickle.load(sys.stdin.buffer)["path"]
    from accel_sft.testing.observed import observed

    task, most = pickle.load(sys.stdin.buffer)
    json.dump({split: observed(task, split, most) for split in ("train", "validation")}, sys.stdout)
