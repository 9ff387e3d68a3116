"""Renders an audit as one HTML page that needs no network: findings, figures, and examples token by token."""

from __future__ import annotations

from importlib import resources

import jinja2

import accel_sft
from accel_sft.io.text import one_line
from accel_sft.tools.check.audit_report import Report
from accel_sft.tools.check.examples import Piece

_FEW, _ROWS = 5, 200
"""Rows of a finding that are visible at once, and rows of it that the page lists."""


def rendered(report: Report) -> str:
    """The page as HTML; all text from the data is escaped."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = lambda value: "-" if value is None else f"{value:,.0f}"
    environment.filters["visible"] = _visible
    text = resources.files("accel_sft.tools.check").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(report=report, version=accel_sft.__version__, few=_FEW, most_rows=_ROWS)


def _visible(piece: Piece) -> str:
    if piece.gap:
        return f" … {piece.text} … "
    return "⏎\n".join(one_line(line, len(line)) for line in piece.text.split("\n"))
