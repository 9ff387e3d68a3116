"""Divides the examples of a step into forwards, and computes their loss."""
