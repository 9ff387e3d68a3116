"""From the examples of a step to forwards and their loss."""
