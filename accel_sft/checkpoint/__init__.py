"""Saves, resumes and exports a run's state, which is stored by parameter."""
