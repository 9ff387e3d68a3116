"""Output to the terminal, and files that are written whole or not at all."""
