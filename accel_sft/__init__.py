"""Supervised fine-tuning of causal language models, with tasks as plugins. A plugin author needs these names only."""

from accel_sft.options import UserError, option
from accel_sft.rows import RowProblem, read_rows
from accel_sft.task import Task

__all__ = ["RowProblem", "Task", "UserError", "option", "read_rows"]
__version__ = "0.1.0"
