"""State by parameter: saved, resumed, exported."""
