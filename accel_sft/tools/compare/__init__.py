"""Cells that are measured against each other: each a real launch, its record, the tables and findings. No torch."""
