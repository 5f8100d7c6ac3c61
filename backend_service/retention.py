"""Which released sequence of a KV cache gives way: what each part of one is worth, and when it was used last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

SHARED_FOR_PLACEMENTS = 64
"""A prefix that none of so many placements started from counts as an ordinary prompt: what was shared once must not
keep others out for ever."""


class Kind(IntEnum):
    """What tokens are worth, the least first."""

    NOTHING = 0
    """Others hold them too."""
    OUTPUT = 1
    """Generated: needed only by who goes on from this very answer."""
    PROMPT = 2
    SHARED = 3
    """Another request was started from them."""


@dataclass(slots=True)
class _Sequence:
    prompt_tokens: int
    """Its first tokens that were part of somebody's prompt."""
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Placements that started from its first tokens: (tokens, number of the placement). A later one from as many
    tokens or more replaces an earlier one, so tokens fall and numbers rise."""


class Retention:
    """Orders the retained sequences by what would be lost with them.

    A sequence has up to three parts: shared (up to the longest prefix from which another one was started lately), the
    rest of its prompt, its output. Only its last part can go. Outputs go first, then prompts, then shared prefixes; of
    one kind the longest unused. The last use of a shared prefix is the last placement that started from it or from a
    part of it; that of the rest of a sequence is its release.

    It knows no tokens, only how many. Sequences are the caller's handles; an unknown one is a `KeyError`. One thread.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._retained: dict[int, int] = {}
        """Tokens of each, in order of release: `min` finds the longest unused of equals."""
        self._placements = 0

    @property
    def retained(self) -> Mapping[int, int]:
        """Tokens of each retained sequence; a view."""
        return MappingProxyType(self._retained)

    def start(self, seq: int, *, prompt_tokens: int, shared_tokens: int, owners: Iterable[int]) -> None:
        """A placement: a new sequence has its first `shared_tokens` tokens in common with the `owners`."""
        self._placements += 1
        self._sequences[seq] = _Sequence(prompt_tokens)
        if shared_tokens:
            for owner in (*owners, seq):
                self._note_start(self._sequences[owner], shared_tokens)

    def retain(self, seq: int, tokens: int) -> None:
        """A live sequence was released with so many tokens, at least one."""
        self._retained[seq] = tokens

    def truncate(self, seq: int, tokens: int) -> None:
        """A retained sequence keeps only its first tokens, at least one."""
        self._retained[seq] = tokens

    def forget(self, seq: int) -> None:
        """A sequence is gone, live or retained."""
        del self._sequences[seq]
        self._retained.pop(seq, None)

    def prompt_tokens(self, seq: int) -> int:
        """The first tokens of a sequence that were part of somebody's prompt; more than it has, if it was cut."""
        return self._sequences[seq].prompt_tokens

    def weakest_part(self) -> tuple[int, int]:
        """What goes next when cells are needed: a sequence, and the tokens before its last part."""
        seq = min(self._retained, key=lambda seq: self._worth(seq, self._retained[seq] - 1))
        kind, _ = self._worth(seq, self._retained[seq] - 1)
        begins = {Kind.OUTPUT: self._sequences[seq].prompt_tokens, Kind.PROMPT: self._shared_tokens(seq)}
        return seq, begins.get(kind, 0)

    def weakest_sequence(self, sole_tokens: Callable[[int], int]) -> int:
        """What goes next when a handle is needed. A sequence is worth the best of what nobody else holds, its last
        `sole_tokens(sequence)` tokens."""
        return min(self._retained, key=lambda seq: self._worth(seq, self._retained[seq] - sole_tokens(seq)))

    def _worth(self, seq: int, position: int) -> tuple[Kind, int]:
        """Of the token at a position: its kind, never better than that of the tokens before it, and its last use."""
        if position >= self._retained[seq]:
            return Kind.NOTHING, 0
        if position < self._shared_tokens(seq):
            return Kind.SHARED, self._sequences[seq].starts[-1][1]
        return Kind.PROMPT if position < self._sequences[seq].prompt_tokens else Kind.OUTPUT, 0

    def _shared_tokens(self, seq: int) -> int:
        return next((tokens for tokens, placement in self._sequences[seq].starts if self._is_recent(placement)), 0)

    def _note_start(self, sequence: _Sequence, tokens: int) -> None:
        longer = [start for start in sequence.starts if start[0] > tokens and self._is_recent(start[1])]
        sequence.starts = [*longer, (tokens, self._placements)]
        sequence.prompt_tokens = max(sequence.prompt_tokens, tokens)

    def _is_recent(self, placement: int) -> bool:
        return self._placements - placement < SHARED_FOR_PLACEMENTS
