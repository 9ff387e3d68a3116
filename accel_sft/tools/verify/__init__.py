"""`accel-sft verify`: holds a run to its own records, and runs stretches of it again."""
