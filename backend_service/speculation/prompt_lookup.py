"""Guesses without a model: what followed the last few tokens when they occurred before.

Right where an answer copies from its prompt or repeats itself (quotes, code, tables, lists), and rare elsewhere: a
guess needs a whole n-gram to have occurred already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

NGRAM_TOKENS = 4
"""Tokens that must have occurred before. Measured (docs/speculation.md): fewer guess more often, and too often wrong;
trying longer n-grams first gains nothing."""


class PromptLookup:
    """Implements `Proposer`. Per sequence one index entry a token; a token costs O(1), a guess O(its length)."""

    name = "prompt_lookup"

    def __init__(self, *, ngram_tokens: int = NGRAM_TOKENS) -> None:
        self._ngram_tokens = ngram_tokens
        self._sequences: dict[int, _Text] = {}

    def start(self, handle: int, tokens: Sequence[int]) -> None:
        """See `Proposer.start`."""
        self._sequences[handle] = text = _Text(self._ngram_tokens)
        text.extend(tokens)

    def accept(self, handle: int, tokens: Sequence[int]) -> None:
        """See `Proposer.accept`."""
        self._sequences[handle].extend(tokens)

    def guess(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """See `Proposer.guess`: what followed the most recent earlier occurrence of the last n-gram. Where that runs
        into the text's end, the text is taken to go on repeating itself."""
        guesses = {handle: self._sequences[handle].continuation(count) for handle, count in wanted.items()}
        return {handle: tokens for handle, tokens in guesses.items() if tokens}

    def forget(self, handle: int) -> None:
        """See `Proposer.forget`."""
        del self._sequences[handle]


@dataclass(slots=True)
class _Text:
    """The known tokens of a sequence, and where each n-gram was last followed by something."""

    ngram_tokens: int
    tokens: list[int] = field(default_factory=list)
    followed_at: dict[tuple[int, ...], int] = field(default_factory=dict)
    """By n-gram, the place after its last occurrence but for the one at the very end, which nothing follows yet."""

    def extend(self, tokens: Sequence[int]) -> None:
        first = max(self.ngram_tokens, len(self.tokens))
        self.tokens += tokens
        for place in range(first, len(self.tokens)):
            self.followed_at[tuple(self.tokens[place - self.ngram_tokens : place])] = place

    def continuation(self, count: int) -> list[int]:
        place = self.followed_at.get(tuple(self.tokens[-self.ngram_tokens :]))
        return [] if place is None else list(islice(cycle(self.tokens[place : place + count]), count))
