"""Tools beside training, each with its own command. Of all of them the engine imports only the quick check."""
