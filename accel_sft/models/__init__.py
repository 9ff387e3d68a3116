"""Weights, tokenizer, adapters, attention."""
