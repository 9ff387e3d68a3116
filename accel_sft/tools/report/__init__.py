"""A page from the folders of runs and comparisons, made from their files alone; no torch."""
