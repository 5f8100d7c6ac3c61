"""Accounting of a KV cache in which every sequence has a copy of its own, and a batch is padded to its longest row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Row:
    length: int
    worst_case: int
    live: bool = True


class KvRows:
    """Counts what a padded batch needs at worst, and what released sequences hold beside it.

    A sequence copies the leading tokens of the one it started from. The batch of the live ones is a rectangle: as many
    rows as there are live sequences, each as long as the longest may become. That rectangle is promised to them
    (used by live rows + reserved); as long as it and what is retained are within the capacity, which the caller sees to
    after a start, no step can run out of room.

    The same methods as `KvCells`. Wrong use raises `ValueError`, or `KeyError` for an unknown sequence, and changes
    nothing. One thread. Each method takes O(live sequences) at most.
    """

    def __init__(self, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            raise ValueError(f"a KV cache of {capacity_tokens} tokens holds nothing; give it at least 1")
        self.capacity_tokens = capacity_tokens
        self._rows: dict[int, _Row] = {}

    @property
    def used(self) -> int:
        """Tokens computed, or copied, and still held; a copy counts as often as it is there."""
        return sum(row.length for row in self._rows.values())

    @property
    def reserved(self) -> int:
        """What the rectangle of the live sequences has beyond their tokens of now: padding, and what they may still
        compute."""
        live = [row for row in self._rows.values() if row.live]
        longest = max((row.worst_case for row in live), default=0)
        return len(live) * longest - sum(row.length for row in live)

    @property
    def retained(self) -> int:
        """The part of `used` that no live sequence holds."""
        return sum(row.length for row in self._rows.values() if not row.live)

    def length(self, seq: int) -> int:
        """Tokens of a sequence, copied ones included."""
        return self._rows[seq].length

    def start(self, seq: int, *, shared_from: int | None, shared_tokens: int, worst_case_tokens: int) -> None:
        """Begin a live sequence with a copy of the first `shared_tokens` tokens of another, live or retained."""
        if seq in self._rows:
            raise ValueError(f"sequence {seq} is there already; remove it first")
        available = 0 if shared_from is None else self._rows[shared_from].length
        if not 0 <= shared_tokens <= available:
            raise ValueError(f"cannot share {shared_tokens} tokens of sequence {shared_from}, which has {available}")
        if worst_case_tokens < shared_tokens:
            raise ValueError(f"a worst case of {worst_case_tokens} tokens is below the {shared_tokens} shared ones")
        self._rows[seq] = _Row(shared_tokens, worst_case_tokens)

    def grow(self, seq: int, tokens: int) -> None:
        """A live sequence computed that many more tokens, up to its worst case."""
        row = self._rows[seq]
        left = row.worst_case - row.length if row.live else 0
        if not 0 <= tokens <= left:
            raise ValueError(f"sequence {seq} cannot grow by {tokens} tokens; it has {left} reserved")
        row.length += tokens

    def retain(self, seq: int) -> None:
        """End a live sequence but keep its tokens."""
        row = self._rows[seq]
        if not row.live:
            raise ValueError(f"sequence {seq} is retained already; share from it or remove it")
        row.live = False

    def remove(self, seq: int) -> None:
        """End a sequence, live or retained, and free its tokens."""
        del self._rows[seq]

    def truncate(self, seq: int, length: int) -> None:
        """Cut a retained sequence to its first tokens."""
        row = self._rows[seq]
        if row.live:
            raise ValueError(f"sequence {seq} is live; retain it before it is cut")
        if not 0 <= length <= row.length:
            raise ValueError(f"sequence {seq} cannot be cut to {length} tokens; it has {row.length}")
        row.length = length

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming the sequence that does not add up."""
        for seq, row in self._rows.items():
            assert row.length >= 0, f"sequence {seq}: length {row.length}"
            assert not row.live or row.length <= row.worst_case, f"sequence {seq}: longer than its worst case"
