"""A task for accel_sft: named entity recognition with the answer as JSON."""

from accel_sft_ner.task import Ner

__all__ = ["Ner"]
