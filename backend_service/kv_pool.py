"""Sequences in one unified KV cache: who shares which prefix, what is retained, what gives way and where it goes.

The pool decides and keeps the books; an engine mirrors each decision in its real cache. Tokens are counted by
`KvCells` where sequences share cells by reference (llama.cpp's unified cache, the simulated engine), and by `KvRows`
where each has a copy and a batch is padded (MLX).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from backend_service.engines.base import KvUse
from backend_service.host_tier import BLOCK_TOKENS, Block, HostTier, Stored, blocks_of, keys_of
from backend_service.kv_cells import KvCells
from backend_service.kv_rows import KvRows
from backend_service.prefix_index import PACKED, Match
from backend_service.retention import Retention
from backend_service.salted_index import SaltedIndex


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of the pool."""

    capacity_tokens: int
    max_live: int
    """Live sequences: the largest batch."""
    max_retained: int = 16
    """Released sequences kept for their prefixes."""
    retained_tokens: int = 512
    """Cells that only retained sequences hold. Attention walks over idle cells too, masked as they are,
    so a warm cache must not be a large one."""
    host_tokens: int = 0
    """Evicted tokens that are kept in host memory; 0: none."""

    @property
    def handles(self) -> int:
        """Sequences that can exist at once."""
        return self.max_live + self.max_retained


@dataclass(frozen=True, slots=True)
class Eviction:
    """Cells that must go."""

    handle: int
    keep_tokens: int
    """The sequence's first tokens that stay; 0: it is gone, the handle is free again."""
    save: tuple[Block, ...]
    """Copy these to host memory first and hand each payload to `KvPool.stash`, in this order."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What an engine has to mirror, in this order: share, evict, restore."""

    handle: int
    source: int | None
    """Share the first `reused_tokens` of this sequence."""
    reused_tokens: int
    """Shared on the device."""
    evicted: tuple[Eviction, ...]
    """What gave way; a sequence comes up once."""
    restorable: tuple[Stored, ...]
    """Consecutive blocks in host memory that continue the shared prefix. The first may start before `reused_tokens`:
    then only its tokens from there on are new. The last may end after len(tokens) - 1: it is to be used up to there.
    The engine puts them back in order, calls `KvPool.grow` for what each brought, and stops at the first that fails."""


class _Cells(Protocol):
    """How the tokens of sequences are counted; see `KvCells` for what each method means."""

    @property
    def used(self) -> int: ...
    @property
    def reserved(self) -> int: ...
    @property
    def retained(self) -> int: ...
    def length(self, seq: int) -> int: ...
    def start(self, seq: int, *, shared_from: int | None, shared_tokens: int, worst_case_tokens: int) -> None: ...
    def grow(self, seq: int, tokens: int) -> None: ...
    def retain(self, seq: int) -> None: ...
    def remove(self, seq: int) -> None: ...
    def truncate(self, seq: int, length: int) -> None: ...
    def check_integrity(self) -> None: ...


class KvPool:
    """The books of one KV cache. `probe` from any thread, everything else from the engine's.

    Prompts of different cache salts find nothing of each other, neither on the device nor in host memory; they share
    the room alone.
    """

    def __init__(self, limits: PoolLimits, *, share: bool = True, copies: bool = False) -> None:
        """`share=False` for models whose state cannot be cut at a prefix (recurrent, hybrid): nothing is retained.
        `copies=True` for an engine whose sequences have a copy each of what they share."""
        self._limits = limits
        self._share = share
        self._copies = copies
        self._index = SaltedIndex()
        self._cells: _Cells = (KvRows if copies else KvCells)(limits.capacity_tokens)
        self._free = list(range(limits.handles - 1, -1, -1))
        self._live: set[int] = set()
        self._retention = Retention()
        self._host = HostTier(limits.host_tokens if share else 0)

    def probe(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Leading tokens that need not be computed if `tokens` were placed now: shared or restored. Changes nothing."""
        packed = array(PACKED, tokens)
        shared = self._match(packed, cache_salt).length
        restorable = self._host.match(keys_of(packed, cache_salt), shared, len(packed) - 1)
        return min(restorable[-1].block.end, len(packed) - 1) if restorable else shared

    def place(self, tokens: Sequence[int], max_new_tokens: int, cache_salt: str = "") -> Placement | None:
        """Reserve the worst case of a new sequence, or None while it does not fit beside the live ones."""
        if len(self._live) == self._limits.max_live:
            return None
        packed = array(PACKED, tokens)
        match = self._match(packed, cache_salt)
        # Of equal prefixes that were computed apart, a live one: its cells are taken in any case.
        source = min(match.owners, key=lambda owner: (owner not in self._live, owner), default=None)
        shared = match.length
        handle = self._free[-1]
        self._cells.start(
            handle, shared_from=source, shared_tokens=shared, worst_case_tokens=len(tokens) + max_new_tokens
        )
        if self._cells.used - self._cells.retained + self._cells.reserved > self._limits.capacity_tokens:
            self._cells.remove(handle)
            return None
        self._free.pop()
        self._live.add(handle)
        self._index.insert(handle, packed[:shared], cache_salt)
        self._retention.start(handle, prompt_tokens=len(tokens), shared_tokens=shared, owners=match.owners)
        self._host.cancel_reserved()
        chain = blocks_of(packed, cache_salt) if self._host.used_tokens else []
        restorable = self._host.match([block.key for block in chain], shared, len(tokens) - 1)
        self._host.touch(chain, prompt_tokens=len(tokens))
        evicted: dict[int, Eviction] = {}
        while self._cells.used + self._cells.reserved > self._limits.capacity_tokens:
            self._evict(*self._retention.weakest_part(), evicted)
        return Placement(handle, source, shared, tuple(evicted.values()), restorable)

    def grow(self, handle: int, tokens: Sequence[int]) -> None:
        """These tokens of a live sequence are computed now, or restored, and shareable from now on."""
        self._cells.grow(handle, len(tokens))
        self._index.extend(handle, tokens)

    def release(self, handle: int, *, retain: bool) -> tuple[Eviction, ...]:
        """End a live sequence; what the engine has to evict, possibly this one."""
        self._live.remove(handle)
        self._host.cancel_reserved()
        evicted: dict[int, Eviction] = {}
        if retain and self._share and (length := self._cells.length(handle)):
            self._cells.retain(handle)
            self._retention.retain(handle, length)
            if self._copies:
                self._drop_copies(evicted)
        else:
            self._drop(handle)
            evicted[handle] = Eviction(handle, 0, ())
        while len(self._retention.retained) > self._limits.max_retained:
            self._evict(self._retention.weakest_sequence(self._index.sole_tokens), 0, evicted)
        while self._cells.retained > self._limits.retained_tokens:
            self._evict(*self._retention.weakest_part(), evicted)
        return tuple(evicted.values())

    def stash(self, block: Block, payload: object) -> None:
        """The engine copied a block that the newest placement or release asked it to save. Once for each; `ValueError`
        for any other."""
        self._host.put(block, payload)

    def clear(self) -> None:
        """Forget every sequence. What is in host memory are copies, and stays."""
        for handle in (*self._live, *self._retention.retained):
            self._drop(handle)
        self._live.clear()
        self._host.cancel_reserved()

    def clear_host(self) -> None:
        """Forget what is in host memory."""
        self._host.clear()

    def use(self) -> KvUse:
        """The books' totals."""
        return KvUse(
            capacity_tokens=self._limits.capacity_tokens,
            used_tokens=self._cells.used,
            retained_tokens=self._cells.retained,
            reserved_tokens=self._cells.reserved,
            host_tokens=self._host.used_tokens,
            host_capacity_tokens=self._host.capacity_tokens,
            padded=self._copies,
        )

    def lengths(self) -> dict[int, int]:
        """Tokens in the cache by sequence, live and retained."""
        return {handle: self._cells.length(handle) for handle in (*self._live, *self._retention.retained)}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every handle is free, live or retained, all books agree and all bounds hold."""
        self._index.check_integrity()
        self._cells.check_integrity()
        self._host.check_integrity()
        retained = self._retention.retained
        held = self._live | retained.keys()
        assert not self._live & retained.keys(), "a sequence is live and retained"
        assert sorted([*held, *self._free]) == list(range(self._limits.handles)), "a handle is lost or doubled"
        assert set(self._index.owners) == held, "the prefix index knows other sequences than the pool"
        for handle, length in self.lengths().items():
            assert len(self._index.tokens_of(handle)) == length, f"sequence {handle} has two lengths"
            assert retained.get(handle, length) == length, f"sequence {handle} has two lengths"
        assert self._index.total_tokens <= self._cells.used, "a cell stands for two salts or two tokens"
        assert self._cells.used + self._cells.reserved <= self._limits.capacity_tokens, "more promised than there is"
        assert self._cells.retained <= self._limits.retained_tokens, "more cells retained than allowed"
        assert len(retained) <= self._limits.max_retained, "more sequences retained than allowed"

    def _match(self, packed: array[int], cache_salt: str) -> Match:
        """What a new sequence can share; the last token is to be computed in any case."""
        return self._index.match(packed[:-1] if self._share else packed[:0], cache_salt)

    def _evict(self, handle: int, keep_tokens: int, evicted: dict[int, Eviction]) -> None:
        """Cut a retained sequence, or drop it when others hold all that would be left of it."""
        held = self._cells.length(handle) - self._index.sole_tokens(handle)
        if keep_tokens <= held:
            keep_tokens = 0
        save = self._saved(handle, max(keep_tokens, held))
        if keep_tokens:
            self._cells.truncate(handle, keep_tokens)
            self._index.truncate(handle, keep_tokens)
            self._retention.truncate(handle, keep_tokens)
        else:
            self._drop(handle)
        # Cut twice: what was to be saved first lies after what is to be saved now.
        earlier = evicted[handle].save if handle in evicted else ()
        evicted[handle] = Eviction(handle, keep_tokens, (*earlier, *save))

    def _drop_copies(self, evicted: dict[int, Eviction]) -> None:
        """Retained sequences of which others hold every token; one at a time, since equal ones hold each other's."""
        for seq in tuple(self._retention.retained):
            if not self._index.sole_tokens(seq):
                self._evict(seq, 0, evicted)

    def _saved(self, handle: int, from_tokens: int) -> tuple[Block, ...]:
        """Blocks to copy to host memory before a sequence's tokens from there on are gone from the device."""
        whole_tokens = self._cells.length(handle) // BLOCK_TOKENS * BLOCK_TOKENS
        if from_tokens >= whole_tokens or not self._host.capacity_tokens:
            return ()
        chain = blocks_of(self._index.tokens_of(handle), self._index.salt_of(handle))
        return self._host.reserve(chain, from_tokens, prompt_tokens=self._retention.prompt_tokens(handle))

    def _drop(self, handle: int) -> None:
        self._cells.remove(handle)
        self._index.remove(handle)
        self._retention.forget(handle)
        self._free.append(handle)
