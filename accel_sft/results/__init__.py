"""Describes a finished run: report, model card, intervals, and scores by label. Needs no torch."""
