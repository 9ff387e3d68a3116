"""The commands that train or come after training, and those that list what is installed."""
