"""Keeps the token ids of examples in files, and decides which examples each step learns from."""
