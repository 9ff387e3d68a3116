"""Shows and records a run: metrics, curves, memory, reports."""
