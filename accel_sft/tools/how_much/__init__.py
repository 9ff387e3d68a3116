"""The tool `how-much`: what more training rows would bring, by trainings on ever more of those that are there."""
