"""As many guesses as have lately been right: what keeps wrong guesses from costing more than they may bring.

A guessed row costs nearly as much as a sampled one where a step is bound by computation, as on a CPU, and a draft model
computes for each guess too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend_service.speculation.base import Proposer

FIRST_GUESSES = 2
LONGEST_PAUSE_STEPS = 16
"""A proposer that is never right then guesses one token in so many steps."""


class AdaptiveProposer:
    """Passes on another proposer's guesses, fewer where they prove wrong.

    Each sequence has a limit: it doubles when all guesses were right, else it falls to as many as were. When none was
    right, a pause follows, each twice as long as the one before.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.name = proposer.name
        self._proposer = proposer
        self._records: dict[int, _Record] = {}

    def start(self, handle: int, tokens: Sequence[int]) -> None:
        """See `Proposer.start`."""
        self._records[handle] = _Record()
        self._proposer.start(handle, tokens)

    def accept(self, handle: int, tokens: Sequence[int]) -> None:
        """See `Proposer.accept`."""
        self._records[handle].judge(right=len(tokens) - 1)
        self._proposer.accept(handle, tokens)

    def guess(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """See `Proposer.guess`."""
        allowed = {handle: self._records[handle].allow(count) for handle, count in wanted.items()}
        guesses = self._proposer.guess({handle: count for handle, count in allowed.items() if count})
        for handle, tokens in guesses.items():
            self._records[handle].guessed = len(tokens)
        return guesses

    def forget(self, handle: int) -> None:
        """See `Proposer.forget`."""
        del self._records[handle]
        self._proposer.forget(handle)


@dataclass(slots=True)
class _Record:
    """How one sequence's guesses went."""

    limit: int = FIRST_GUESSES
    guessed: int = 0
    """Tokens that the step in progress verifies."""
    pause_steps: int = 0
    """Length of the last pause; 0 since a guess was right."""
    left_steps: int = 0
    """Of the pause in progress."""

    def allow(self, count: int) -> int:
        if self.left_steps:
            self.left_steps -= 1
            return 0
        return min(count, self.limit)

    def judge(self, right: int) -> None:
        guessed, self.guessed = self.guessed, 0
        if not guessed:
            return
        self.limit = max(self.limit, 2 * guessed) if right == guessed else max(1, right)
        self.pause_steps = 0 if right else min(LONGEST_PAUSE_STEPS, max(1, 2 * self.pause_steps))
        self.left_steps = self.pause_steps
