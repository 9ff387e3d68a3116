"""The conformance kit of tasks: a test class to subclass. pytest collects it, and importing it needs no pytest."""

from accel_sft.testing.conformance import TaskConformance

__all__ = ["TaskConformance"]
