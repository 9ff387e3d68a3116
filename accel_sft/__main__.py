"""Runs the command group, for `python -m accel_sft` and for the console script `accel-sft`."""

import os
import sys

if sys.platform == "win32":  # before the imports below, which would fail
    sys.exit(
        "Error: accel_sft runs on Linux, and on macOS in one process. On Windows, install WSL (`wsl --install`), and "
        "run the README's commands in WSL's terminal"
    )

try:
    import click  # noqa: F401
except ModuleNotFoundError:
    sys.exit("Error: this Python lacks the libraries of accel_sft; activate their environment: . .venv/bin/activate")

import accel_sft.launch.launcher  # noqa: F401 - early: it reads the parent's process id
from accel_sft.cli.group import cli
from accel_sft.commands.listings import NAME, VARIABLE
from accel_sft.io.terminal import escape_unencodable
from accel_sft.resilience.exit import ExitHandler, leave_together


def main() -> None:
    """Run the command line, and end the process with the exit status of the command."""
    escape_unencodable()
    # not `cli.main()`: click exits silently on a broken pipe or an EOFError, also of a plugin or a collective
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
