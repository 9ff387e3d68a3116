"""Renders an audit as one HTML page that needs no network: findings, figures, and examples token by token."""

from __future__ import annotations

from importlib import resources

import jinja2

import accel_sft
from accel_sft.tools.check.audit_report import Report

_FEW, _ROWS = 5, 200
"""Maximum number of a finding's rows that are visible at once, and of those that the page lists in all."""


def rendered(report: Report) -> str:
    """The page as HTML; all text from the data is escaped."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = lambda value: "-" if value is None else f"{value:,.0f}"
    text = resources.files("accel_sft.tools.check").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(report=report, version=accel_sft.__version__, few=_FEW, most_rows=_ROWS)
