"""Memory and speed of a training run before it starts: from a model's configuration, a launch and a job. No torch."""
