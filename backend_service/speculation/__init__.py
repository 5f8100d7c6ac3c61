"""Speculative decoding: guesses that a step verifies."""
