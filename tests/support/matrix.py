"""A test of several checks: the first always runs, the others are `long`."""

import functools
import inspect

import pytest


def matrix(first, *others):
    """Parametrize a test by checks: functions, or partials of functions, whose other arguments are fixtures."""
    long = [pytest.param(check, marks=pytest.mark.long, id=_name(check)) for check in others]
    return pytest.mark.parametrize("check", [pytest.param(first, id=_name(first)), *long])


def run(check, request):
    """Call a check of `matrix` with the fixtures that its arguments name."""
    given = check.keywords if isinstance(check, functools.partial) else {}
    wanted = [name for name in inspect.signature(check).parameters if name not in given]
    return check(**{name: request.getfixturevalue(name) for name in wanted})


def _name(check):
    if isinstance(check, functools.partial):
        return "-".join([check.func.__name__, *map(str, check.keywords.values())])
    return check.__name__
