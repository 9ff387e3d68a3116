"""What this machine can run: the checks of `accel-sft doctor`, and the launch files that work here."""
