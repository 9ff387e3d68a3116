"""The tool `compare`: launches a task's training under several settings, and writes tables and findings about them.

No module here imports torch.
"""
