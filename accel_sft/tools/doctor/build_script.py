"""A script that loads one of DeepSpeed's operators, compiling it as a launch would if it is not compiled yet."""

import os
import sys

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder"}


def main(name: str) -> None:
    from accel_sft.launch.environment import device_count

    if not device_count():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as a launch does
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(BUILDERS[name]).load()


if __name__ == "__main__":
    main(sys.argv[1])
