"""Whether what a server answers is what was trained, and what is the likely cause if not."""
