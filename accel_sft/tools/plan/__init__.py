"""The tool `plan`: predicts memory and speed of a run from a model's configuration, a launch and a job."""
