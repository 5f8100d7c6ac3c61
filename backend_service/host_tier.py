"""A second tier for a KV cache: copies of evicted blocks in host memory, found by the tokens they stand for."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from backend_service.prefix_index import PACKED

BLOCK_TOKENS = 16
"""A prefix that ends inside a block loses that block's part of it. Blocks of 16 tokens are copied half as fast as
blocks of 64, but still hundreds of times faster than their tokens are computed (docs/measurements.md)."""
MIN_RESTORE_TOKENS = 16
"""Fewer tokens are computed as fast as they are copied back."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of a sequence's tokens that the host tier stores as one."""

    key: bytes
    """Names the block, everything before it and the cache salt: 16 bytes, the digest of the previous block's key, or of
    the salt, and its own tokens."""
    start: int
    """In tokens, a multiple of `BLOCK_TOKENS`."""
    end: int
    """start + BLOCK_TOKENS."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A block and its copy."""

    block: Block
    payload: object
    """Whatever the engine gave."""


def blocks_of(tokens: Sequence[int], salt: str = "") -> list[Block]:
    """The whole blocks of a sequence, in order: a chain."""
    starts = range(0, len(tokens), BLOCK_TOKENS)
    return [Block(key, start, start + BLOCK_TOKENS) for key, start in zip(keys_of(tokens, salt), starts, strict=False)]


def keys_of(tokens: Sequence[int], salt: str = "") -> Iterator[bytes]:
    """The keys of `blocks_of`, hashed as far as they are read."""
    packed = array(PACKED, tokens)
    data, size = packed.tobytes(), packed.itemsize * BLOCK_TOKENS
    # By another kind of digest than a block's: whatever a salt is, its chains are nobody else's.
    key = hashlib.blake2b(salt.encode(), digest_size=16, person=b"cache salt").digest()
    for end in range(size, len(data) + 1, size):
        key = hashlib.blake2b(key + data[end - size : end], digest_size=16).digest()
        yield key


class HostTier:
    """Copies of blocks, bounded by tokens.

    Output blocks go before prompt blocks, the longest unused first. A use of a chain counts for its last block first,
    so that no block goes before the one that follows it: without what comes before, a block is no prefix. A block need
    not have its predecessors here, they may be on the device.

    A copy comes after the decision to make it, but has its place in the order, and its room, from the decision on: of
    several decisions before the first copy, each counts on what the ones before it left.

    `match` and `used_tokens` from any thread; everything else from one.
    """

    def __init__(self, capacity_tokens: int) -> None:
        """With less than `BLOCK_TOKENS` it holds nothing. Raises `ValueError` below 0."""
        if capacity_tokens < 0:
            raise ValueError(f"a host tier of {capacity_tokens} tokens cannot be; 0 is none")
        self.capacity_tokens = capacity_tokens
        self._stored: dict[bytes, Stored] = {}
        """The only thing that `match` reads. A key stays in it through every use of its block."""
        self._reserved: set[Block] = set()
        """Their copies are still to come."""
        self._outputs: OrderedDict[bytes, None] = OrderedDict()
        self._prompts: OrderedDict[bytes, None] = OrderedDict()
        """Both in order of last use, the longest unused first. A block, stored or reserved, is in one of them; but one
        that was reserved may have gone from it before its copy came."""

    @property
    def used_tokens(self) -> int:
        """Tokens stored. O(1)."""
        return len(self._stored) * BLOCK_TOKENS

    def match(self, keys: Iterable[bytes], from_tokens: int, to_tokens: int) -> tuple[Stored, ...]:
        """The stored blocks of a chain that bring a prefix of `from_tokens` tokens towards `to_tokens` without a gap.
        The first may start before the one, the last end after the other. None for a gain below `MIN_RESTORE_TOKENS`.

        Reads of the keys only what it needs, and changes nothing.
        """
        if not self._stored or to_tokens - from_tokens < MIN_RESTORE_TOKENS:
            return ()
        run = []
        for end, key in zip(count(BLOCK_TOKENS, BLOCK_TOKENS), keys, strict=False):
            if end > from_tokens:
                stored = self._stored.get(key)
                if stored is None:
                    break
                run.append(stored)
        gain = min(run[-1].block.end, to_tokens) - from_tokens if run else 0
        return tuple(run) if gain >= MIN_RESTORE_TOKENS else ()

    def touch(self, chain: Sequence[Block], *, prompt_tokens: int) -> None:
        """Note the use of a chain from its first block on. Of what is here, the blocks within the first
        `prompt_tokens` tokens were part of somebody's prompt, and are prompt blocks from now on."""
        for block in reversed(chain):
            if self._has_place(block):
                self._use(block, is_output=block.end > prompt_tokens)

    def reserve(self, chain: Sequence[Block], from_tokens: int, *, prompt_tokens: int) -> tuple[Block, ...]:
        """`touch` a chain whose tokens from `from_tokens` on go, and make room for those of its blocks that go and are
        not here: the ones to copy, the last first. `put` each.

        None of them would push out another, a block before it, or, output, somebody's prompt.
        """
        room = self.capacity_tokens // BLOCK_TOKENS
        other_prompts = len(self._prompts)  # than those of the chain up to a block; the ones behind it count
        kept, save = 0, []
        for block in chain:
            other_prompts -= block.key in self._prompts
            if self._has_place(block):
                kept += 1
            elif block.end > from_tokens and kept + (other_prompts if block.end > prompt_tokens else 0) < room:
                kept += 1
                save.append(block)
        for block in save:
            self._use(block, is_output=block.end > prompt_tokens)
        self.touch(chain, prompt_tokens=prompt_tokens)
        while len(self._outputs) + len(self._prompts) > room:
            oldest, _ = (self._outputs or self._prompts).popitem(last=False)
            self._stored.pop(oldest, None)
        self._reserved.update(save)
        return tuple(reversed(save))

    def put(self, block: Block, payload: object) -> None:
        """Store a reserved block's copy, unless a later decision gave its room to others. Once for each; `ValueError`
        for any other block."""
        if block not in self._reserved:
            raise ValueError(f"tokens {block.start}..{block.end}: not to be saved; copy what the last eviction names")
        self._reserved.remove(block)
        if self._has_place(block):
            self._stored[block.key] = Stored(block, payload)

    def cancel_reserved(self) -> None:
        """The copies that have not come will not: their room is free."""
        for block in self._reserved:
            self._outputs.pop(block.key, None)
            self._prompts.pop(block.key, None)
        self._reserved.clear()

    def clear(self) -> None:
        """Forget every block, reserved ones included."""
        self._stored.clear()
        self._reserved.clear()
        self._outputs.clear()
        self._prompts.clear()

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming the invariant that does not hold."""
        places = self._outputs.keys() | self._prompts.keys()
        reserved = {block.key for block in self._reserved}
        assert not self._outputs.keys() & self._prompts.keys(), "a block is prompt and output"
        assert not self._stored.keys() & reserved, "a block is stored and its copy still to come"
        assert self._stored.keys() <= places, "a block is in no order of use"
        assert places <= self._stored.keys() | reserved, "a block that is not here has a place in the order of use"
        assert len(places) * BLOCK_TOKENS <= self.capacity_tokens, "more tokens stored than allowed"
        for key, stored in self._stored.items():
            assert stored.block.key == key, "a block is stored under another one's key"

    def _has_place(self, block: Block) -> bool:
        return block.key in self._prompts or block.key in self._outputs

    def _use(self, block: Block, *, is_output: bool) -> None:
        order = self._outputs if is_output and block.key not in self._prompts else self._prompts
        if order is self._prompts:
            self._outputs.pop(block.key, None)
        order[block.key] = None
        order.move_to_end(block.key)
