"""Answers, scores, metrics."""
