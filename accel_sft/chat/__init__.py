"""Turns an example into token ids and a mask of what is learnt."""
