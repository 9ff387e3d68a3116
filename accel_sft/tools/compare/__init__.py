"""The tool `compare`: launches a task's training under several settings; tables and findings. Without torch."""
