"""Describes a finished run: its report, its model card, intervals and labels. Needs no torch."""
