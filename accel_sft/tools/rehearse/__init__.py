"""A whole run on a shrunk model, before it is paid for: `accel-sft rehearse`."""
