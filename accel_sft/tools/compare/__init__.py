"""The tool `compare`: runs a task's training under several settings; writes tables and findings. Needs no torch."""
