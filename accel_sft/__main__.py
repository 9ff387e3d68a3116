"""`python -m accel_sft` and the console script `accel-sft`: the same command group."""

import os
import sys

if sys.platform == "win32":  # before imports of what there is not
    sys.exit(
        "Error: accel_sft runs on Linux, and on macOS in one process. On Windows, run it in WSL: `wsl --install`, and "
        "in its terminal the commands of the README"
    )

try:
    import click  # noqa: F401
except ModuleNotFoundError:
    sys.exit("Error: this Python lacks accel_sft's libraries; activate its environment: . .venv/bin/activate")

import accel_sft.launch.launcher  # noqa: F401 - early: it notes who started this process
from accel_sft.cli.group import cli
from accel_sft.commands.listings import NAME, VARIABLE
from accel_sft.io.terminal import escape_unencodable
from accel_sft.resilience.exit import ExitHandler, leave_together


def main() -> None:
    """Run the command line; ends the process with the status of the command."""
    escape_unencodable()
    # not click's own main: it ends broken pipes and EOFErrors in silence, also those of a plugin or a collective
    with ExitHandler() as ending:
        if VARIABLE in os.environ:
            from click.shell_completion import shell_complete

            sys.exit(shell_complete(cli, {}, NAME, VARIABLE, os.environ[VARIABLE]))
        with cli.make_context(NAME, sys.argv[1:], obj=ending) as context:
            cli.invoke(context)
        sys.stdout.flush()
        leave_together()
    sys.exit(0)


if __name__ == "__main__":
    main()
