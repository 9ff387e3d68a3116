"""Named entity recognition with the answer as JSON: a task for accel_sft."""

from accel_sft_ner.task import Ner

__all__ = ["Ner"]
