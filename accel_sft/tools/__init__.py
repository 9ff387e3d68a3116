"""Tools around training, each with its own command. The trainer imports only one of their modules, `check.tokens`."""
