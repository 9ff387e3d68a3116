"""The tool `compare`: measures cells against each other, each a real launch, and writes tables and findings.

No module here imports torch.
"""
