"""The tool `rehearse`: makes a complete run on a shrunk model, before you pay for the real run."""
