"""`python -m accel_sft` and the console script `accel-sft`: the same command group."""

import sys

from accel_sft.cli import cli
from accel_sft.failure import Ending, use_utf8


def main() -> None:
    """Run the command line; ends the process with the status of the command."""
    use_utf8()
    with Ending() as ending:
        status = cli.main(prog_name="accel-sft", standalone_mode=False, obj=ending)
        sys.stdout.flush()
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
