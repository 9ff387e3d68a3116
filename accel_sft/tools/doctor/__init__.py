"""The tool `doctor`: checks what this machine can run, and which launch files work here."""
