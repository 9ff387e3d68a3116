"""The tool `parity`: compares a server's answers with those of the trained weights, and names why they differ."""
