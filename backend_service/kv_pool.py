"""Sequences in one unified KV cache: who shares which prefix, what is retained, who must go to make room.

The pool decides and keeps the books; an engine mirrors each decision in its real cache. It serves every engine whose
sequences share cells by reference (llama.cpp's unified cache, the simulated engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend_service.engines.base import KvUse
from backend_service.kv_cells import KvCells
from backend_service.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of the pool."""

    capacity_tokens: int
    max_live: int
    """Live sequences: the largest batch."""
    max_retained: int = 16
    """Released sequences kept for their prefixes."""
    retained_tokens: int = 2048
    """Cells that only retained sequences hold. Attention walks over idle cells too, masked as they are,
    so a warm cache must not be a large one."""

    @property
    def handles(self) -> int:
        """Sequences that can exist at once."""
        return self.max_live + self.max_retained


@dataclass(frozen=True, slots=True)
class Placement:
    """What an engine has to mirror, in this order: share, then drop."""

    handle: int
    source: int | None
    """Share the first `reused_tokens` of this sequence."""
    reused_tokens: int
    dropped: tuple[int, ...]
    """Retained sequences that gave way."""


class KvPool:
    """The books of one KV cache. `probe` from any thread, everything else from the engine's."""

    def __init__(self, limits: PoolLimits, *, share: bool = True) -> None:
        """`share=False` for models whose state cannot be cut at a prefix (recurrent, hybrid): nothing is retained."""
        self._limits = limits
        self._share = share
        self._index = PrefixIndex()
        self._cells = KvCells(limits.capacity_tokens)
        self._free = list(range(limits.handles - 1, -1, -1))
        self._live: set[int] = set()
        self._retained: dict[int, None] = {}
        """In order of last use, the longest unused first."""

    def probe(self, tokens: Sequence[int]) -> int:
        """Leading tokens that `place` could share now. Changes nothing."""
        return min(self._index.match(tokens).length, len(tokens) - 1) if self._share else 0

    def place(self, tokens: Sequence[int], max_new_tokens: int) -> Placement | None:
        """Reserve the worst case of a new sequence, or None while it does not fit beside the live ones."""
        if len(self._live) == self._limits.max_live:
            return None
        source, shared = self._source(tokens)
        handle = self._free[-1]
        self._cells.start(
            handle, shared_from=source, shared_tokens=shared, worst_case_tokens=len(tokens) + max_new_tokens
        )
        if self._cells.used - self._cells.retained + self._cells.reserved > self._limits.capacity_tokens:
            self._cells.remove(handle)
            return None
        self._free.pop()
        self._live.add(handle)
        self._index.insert(handle, tokens[:shared])
        if source in self._retained:
            self._touch(source)
        dropped = []
        while self._cells.used + self._cells.reserved > self._limits.capacity_tokens:
            dropped.append(self._drop_oldest())
        return Placement(handle, source, shared, tuple(dropped))

    def grow(self, handle: int, tokens: Sequence[int]) -> None:
        """These tokens of a live sequence are computed now, and shareable from now on."""
        self._cells.grow(handle, len(tokens))
        self._index.extend(handle, tokens)

    def release(self, handle: int, *, retain: bool) -> tuple[int, ...]:
        """End a live sequence; the sequences to drop from the cache, possibly this one."""
        self._live.remove(handle)
        if not (retain and self._share):
            self._drop(handle)
            return (handle,)
        self._cells.retain(handle)
        self._touch(handle)
        dropped = []
        while len(self._retained) > self._limits.max_retained or self._cells.retained > self._limits.retained_tokens:
            dropped.append(self._drop_oldest())
        return tuple(dropped)

    def clear(self) -> None:
        """Forget every sequence."""
        for handle in (*self._live, *self._retained):
            self._drop(handle)
        self._live.clear()
        self._retained.clear()

    def use(self) -> KvUse:
        """The books' totals."""
        return KvUse(
            capacity_tokens=self._limits.capacity_tokens,
            used_tokens=self._cells.used,
            retained_tokens=self._cells.retained,
            reserved_tokens=self._cells.reserved,
        )

    def lengths(self) -> dict[int, int]:
        """Tokens in the cache by sequence, live and retained."""
        return {handle: self._cells.length(handle) for handle in (*self._live, *self._retained)}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every handle is free, live or retained and all books agree."""
        self._index.check_integrity()
        self._cells.check_integrity()
        held = self._live | self._retained.keys()
        assert not self._live & self._retained.keys(), "a sequence is live and retained"
        assert sorted([*held, *self._free]) == list(range(self._limits.handles)), "a handle is lost or doubled"
        assert set(self._index.owners) == held, "the prefix index knows other sequences than the pool"
        for handle, length in self.lengths().items():
            assert len(self._index.tokens_of(handle)) == length, f"sequence {handle} has two lengths"
        assert self._cells.used + self._cells.reserved <= self._limits.capacity_tokens, "more promised than there is"

    def _source(self, tokens: Sequence[int]) -> tuple[int | None, int]:
        if not self._share:
            return None, 0
        match = self._index.match(tokens)
        shared = min(match.length, len(tokens) - 1)
        return (min(match.owners), shared) if shared else (None, 0)

    def _touch(self, handle: int) -> None:
        self._retained.pop(handle, None)
        self._retained[handle] = None

    def _drop_oldest(self) -> int:
        oldest = next(iter(self._retained))
        del self._retained[oldest]
        self._drop(oldest)
        return oldest

    def _drop(self, handle: int) -> None:
        self._cells.remove(handle)
        self._index.remove(handle)
        self._free.append(handle)
