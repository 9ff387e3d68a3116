"""Signals, hangs, lost ranks, NaN losses and gradients: how a run ends, and what it reports."""
