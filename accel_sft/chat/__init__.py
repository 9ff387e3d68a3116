"""From an example to token ids and a mask of what is learnt."""
