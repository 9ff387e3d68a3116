"""Audits a task's data before training, and says what is wrong, in which file and line, and how to fix it."""
