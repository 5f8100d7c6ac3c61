"""The plug for speculative decoding: who guesses what comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Proposer(Protocol):
    """Guesses tokens. The engine verifies them: a wrong guess costs time and never changes an answer. Engine thread."""

    name: str

    def start(self, handle: int, tokens: Sequence[int]) -> None:
        """A sequence begins: its whole prompt."""

    def accept(self, handle: int, tokens: Sequence[int]) -> None:
        """Everything that a step sampled for a sequence, in order: the guesses that were right, and one token more."""

    def guess(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """By handle, at most that many tokens that may follow the known ones; fewer or none is fine. Once a step, for
        all sequences that decode; what it gives, the step verifies."""

    def forget(self, handle: int) -> None:
        """A sequence has ended; its handle may start anew."""
