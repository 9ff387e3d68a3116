"""The command line: options of tasks and tools, and their help."""
