"""Who holds which tokens, apart by cache salt: what one salt's prompts left is nothing to another's."""

from __future__ import annotations

from collections.abc import Sequence

from backend_service.prefix_index import Match, PrefixIndex

_NOTHING = Match(0, frozenset())


class SaltedIndex:
    """A `PrefixIndex` for each salt that has an owner; the empty salt is one like any other.

    An owner is in one salt from its insertion to its removal. Errors are those of `PrefixIndex`. `match` from any
    thread, everything else from one.
    """

    def __init__(self) -> None:
        self._indices: dict[str, PrefixIndex] = {}
        self._salts: dict[int, str] = {}

    @property
    def owners(self) -> frozenset[int]:
        """Everybody in any salt."""
        return frozenset(self._salts)

    @property
    def total_tokens(self) -> int:
        """Tokens over all salts, common prefixes counted once in each."""
        return sum(index.total_tokens for index in self._indices.values())

    def match(self, tokens: Sequence[int], salt: str) -> Match:
        """See `PrefixIndex.match`; only those of this salt count."""
        index = self._indices.get(salt)
        return index.match(tokens) if index else _NOTHING

    def insert(self, owner: int, tokens: Sequence[int], salt: str) -> None:
        """See `PrefixIndex.insert`."""
        if owner in self._salts:
            raise ValueError(f"owner {owner} is in the index already; remove it first, or extend it")
        index = self._indices.get(salt) or PrefixIndex()
        index.insert(owner, tokens)
        self._indices[salt] = index
        self._salts[owner] = salt

    def extend(self, owner: int, tokens: Sequence[int]) -> None:
        """See `PrefixIndex.extend`."""
        self._of(owner).extend(owner, tokens)

    def remove(self, owner: int) -> None:
        """See `PrefixIndex.remove`; a salt without owners is forgotten."""
        index = self._of(owner)
        index.remove(owner)
        salt = self._salts.pop(owner)
        if not index.owners:
            del self._indices[salt]

    def truncate(self, owner: int, length: int) -> None:
        """See `PrefixIndex.truncate`."""
        self._of(owner).truncate(owner, length)

    def sole_tokens(self, owner: int) -> int:
        """See `PrefixIndex.sole_tokens`."""
        return self._of(owner).sole_tokens(owner)

    def tokens_of(self, owner: int) -> list[int]:
        """See `PrefixIndex.tokens_of`."""
        return self._of(owner).tokens_of(owner)

    def salt_of(self, owner: int) -> str:
        """Raises `KeyError` for an unknown owner."""
        return self._salts[owner]

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every index holds, and exactly those have one who should."""
        by_salt: dict[str, set[int]] = {}
        for owner, salt in self._salts.items():
            by_salt.setdefault(salt, set()).add(owner)
        assert by_salt.keys() == self._indices.keys(), "a salt without owners has an index, or owners have none"
        for salt, index in self._indices.items():
            index.check_integrity()
            assert index.owners == by_salt[salt], "an index holds sequences of another salt"

    def _of(self, owner: int) -> PrefixIndex:
        return self._indices[self._salts[owner]]
