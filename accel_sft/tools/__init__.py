"""Tools beside training, each with its own command. The engine imports only one of their modules, `check.tokens`."""
