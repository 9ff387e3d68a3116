"""Audits a task's data before it is trained on: what is wrong, at which file and line, and how to mend it."""
