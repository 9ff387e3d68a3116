"""Audits a task's data before training, and says what is wrong, at which file and line, and how to fix it."""
