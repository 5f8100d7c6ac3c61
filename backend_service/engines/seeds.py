"""Randomness for one draw from a request's seed and the place of the token alone: the same whoever else draws, in what
order, and on which backend the answer began."""

from __future__ import annotations

_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


def mixed(seed: int, draw: int) -> int:
    """64 bits for the n-th token of an answer, counted from 1. splitmix64 (Steele, Lea, Flood 2014): close seeds and
    places give unrelated values."""
    value = (seed + draw * _GOLDEN) & _MASK_64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK_64
    return value ^ (value >> 31)
