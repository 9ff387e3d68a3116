"""The terminal, and files that are whole or not there."""
