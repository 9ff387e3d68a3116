"""The option `--smoke` runs any benchmark in one small round to show that it works; its numbers mean nothing.

python benchmarks/NAME.py --smoke
"""

from __future__ import annotations

import argparse
from typing import Any


def parser(description: str) -> argparse.ArgumentParser:
    """A parser that shows `description` as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse(parser: argparse.ArgumentParser, **small: Any) -> argparse.Namespace:
    """The command line's arguments; with `--smoke`, those in `small` have these values unless the user gives them."""
    told = ", ".join(f"{name} {value}" for name, value in small.items())
    parser.add_argument("--smoke", action="store_true", help=f"Only check that it runs: {told}.")
    args = parser.parse_args()
    if unknown := small.keys() - vars(args).keys():
        raise LookupError(f"--smoke sets {', '.join(sorted(unknown))}, which are not arguments here")
    if args.smoke:
        parser.set_defaults(**dict.fromkeys(small))
        args = parser.parse_args()
        for name, value in small.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
    return args
