"""`accel-sft verify`: holds a run to its own records, and runs segments of it again."""
