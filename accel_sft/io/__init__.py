"""Writes to the terminal, and writes files as a whole or not at all."""
