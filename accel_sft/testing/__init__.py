"""Conformance tests for tasks: a test class to subclass. pytest collects the subclass; this module needs no pytest."""

from accel_sft.testing.conformance import TaskConformance

__all__ = ["TaskConformance"]
