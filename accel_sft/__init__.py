"""Supervised fine-tuning of causal language models, with tasks as plugins. A plugin needs only the names below."""

from accel_sft.api.errors import UserError
from accel_sft.api.options import option
from accel_sft.api.task import Task
from accel_sft.io.text import MISSING_VALUES
from accel_sft.rows.json_stream import ParsedRow, RowLeftOut, RowProblem
from accel_sft.rows.rows import read_rows

__all__ = ["MISSING_VALUES", "ParsedRow", "RowLeftOut", "RowProblem", "Task", "UserError", "option", "read_rows"]
__version__ = "0.1.0"
