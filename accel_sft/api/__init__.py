"""Defines tasks and settings, and finds the installed tasks. Importing it needs only the standard library."""
