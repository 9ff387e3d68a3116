"""From a file to examples, each with its file, line and field."""
