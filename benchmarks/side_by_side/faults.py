"""The ways in which the comparison cannot begin."""

from __future__ import annotations


class SetUpFailed(Exception):
    """Something that the benchmark needs is not there; the message says what to do."""
