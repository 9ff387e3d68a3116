"""The loop and its run folder."""
