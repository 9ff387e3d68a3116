"""Generates answers, scores them, and computes the metrics."""
