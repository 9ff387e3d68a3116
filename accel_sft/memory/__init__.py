"""Predicts the memory that a run needs, for training and for `plan`."""
