"""What this launch is, and the Accelerator made from it."""
