"""Defines tasks and settings, and finds the installed tasks. To import it, the standard library is enough."""
