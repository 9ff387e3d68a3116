"""The tool `plan`: predicts memory and speed of a training run from a model's configuration, a launch and a job.

Only `simulation` and its `peak_tracker` import torch.
"""
