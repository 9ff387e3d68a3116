"""The training loop, its preparation, and the folder and records of a run."""
