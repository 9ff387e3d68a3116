"""Reads and audits the launch, and builds the Accelerator from it."""
