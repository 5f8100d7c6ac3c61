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
"""A prefix that ends inside a block loses that block's part of it. Blocks of 16 tokens are copied half as fast as blocks
of 64, but still two orders of magnitude faster than their tokens are computed (docs/measurements.md)."""
MIN_RESTORE_TOKENS = 16
"""Fewer tokens are computed as fast as they are copied back."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of a sequence's tokens that the host tier stores as one."""

    key: bytes
    """Names the block and everything before it: 16 bytes, the digest of the previous block's key and its own tokens."""
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


def blocks_of(tokens: Sequence[int]) -> list[Block]:
    """The whole blocks of a sequence, in order: a chain."""
    starts = range(0, len(tokens), BLOCK_TOKENS)
    return [Block(key, start, start + BLOCK_TOKENS) for key, start in zip(keys_of(tokens), starts, strict=False)]


def keys_of(tokens: Sequence[int]) -> Iterator[bytes]:
    """The keys of `blocks_of`, hashed as far as they are read."""
    packed = array(PACKED, tokens)
    data, size = packed.tobytes(), packed.itemsize * BLOCK_TOKENS
    key = b""
    for end in range(size, len(data) + 1, size):
        key = hashlib.blake2b(key + data[end - size : end], digest_size=16).digest()
        yield key


class HostTier:
    """Copies of blocks, bounded by tokens.

    Output blocks go before prompt blocks, the longest unused first. A use of a chain counts for its last block first,
    so that no block goes before the one that follows it: without what comes before, a block is no prefix. A block need
    not have its predecessors here, they may be on the device.

    `match` and `used_tokens` from any thread; everything else from one.
    """

    def __init__(self, capacity_tokens: int) -> None:
        """With less than `BLOCK_TOKENS` it holds nothing. Raises `ValueError` below 0."""
        if capacity_tokens < 0:
            raise ValueError(f"a host tier of {capacity_tokens} tokens cannot be; 0 is none")
        self.capacity_tokens = capacity_tokens
        self._stored: dict[bytes, Stored] = {}
        """The only thing that `match` reads. A key stays in it through every use of its block."""
        self._outputs: OrderedDict[bytes, None] = OrderedDict()
        self._prompts: OrderedDict[bytes, None] = OrderedDict()
        """Both in order of last use, the longest unused first. A block is in one of them."""

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

    def missing(self, chain: Sequence[Block], from_tokens: int, *, prompt_tokens: int) -> tuple[Block, ...]:
        """The blocks of a chain to copy when its tokens from `from_tokens` on go, the last first: `put` them in this
        order, each followed by a `touch` of the chain before it.

        They are not stored yet, and none would push out another, a block before it, or, output, somebody's prompt.
        """
        room = self.capacity_tokens // BLOCK_TOKENS
        other_prompts = len(self._prompts) - sum(block.key in self._prompts for block in chain)
        kept, save = 0, []
        for block in chain:
            if block.key in self._stored:
                kept += 1
            elif block.end > from_tokens and kept + (other_prompts if block.end > prompt_tokens else 0) < room:
                kept += 1
                save.append(block)
        return tuple(reversed(save))

    def put(self, block: Block, payload: object, *, is_output: bool) -> None:
        """Store a copy, or only note the use of one that is here; then what is too much goes, maybe this one."""
        self._stored.setdefault(block.key, Stored(block, payload))
        self._use(block, is_output=is_output)
        while self.used_tokens > self.capacity_tokens:
            oldest, _ = (self._outputs or self._prompts).popitem(last=False)
            del self._stored[oldest]

    def touch(self, chain: Sequence[Block], *, prompt_tokens: int) -> None:
        """Note the use of a chain from its first block on. Of what is stored, the blocks within the first
        `prompt_tokens` tokens were part of somebody's prompt, and are prompt blocks from now on."""
        for block in reversed(chain):
            if block.key in self._stored:
                self._use(block, is_output=block.end > prompt_tokens)

    def clear(self) -> None:
        """Forget every block."""
        self._stored.clear()
        self._outputs.clear()
        self._prompts.clear()

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming the invariant that does not hold."""
        assert not self._outputs.keys() & self._prompts.keys(), "a block is prompt and output"
        assert self._outputs.keys() | self._prompts.keys() == self._stored.keys(), "a block is in no order of use"
        assert self.used_tokens <= self.capacity_tokens, "more tokens stored than allowed"
        for key, stored in self._stored.items():
            assert stored.block.key == key, "a block is stored under another one's key"

    def _use(self, block: Block, *, is_output: bool) -> None:
        order = self._outputs if is_output and block.key not in self._prompts else self._prompts
        if order is self._prompts:
            self._outputs.pop(block.key, None)
        order[block.key] = None
        order.move_to_end(block.key)
