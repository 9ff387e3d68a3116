"""Reads files into examples; errors name file, line and field."""
