"""The tool `verify`: compares a run with its own records, and runs segments of it again."""
