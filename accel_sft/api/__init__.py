"""What plugins and settings are: tasks, options, the registry of installed tasks. No torch, no third party."""
