"""Accounting of a KV cache whose sequences share cells by reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Segment:
    """A run of cells that exactly the same sequences reference: those whose tail is this segment or below it."""

    parent: _Segment | None
    tokens: int
    references: int
    live: int
    """The references that live sequences hold."""
    children: set[_Segment] = field(default_factory=set)


@dataclass(slots=True)
class _Sequence:
    tail: _Segment
    """The cells of its own; a leaf, so that it can grow."""
    length: int
    reserved: int
    live: bool = True


class KvCells:
    """Counts the cells of one unified pool, one cell a token.

    A sequence references the leading cells of the one it started from and computes more of its own; a cell is free
    again when its last reference goes. While a sequence is live, the cells it may still compute are reserved: as long
    as used + reserved is within the capacity, which the caller sees to after a start, no step can run out of room.

    Segments form a tree in which a sequence is a path from the root to a leaf. The tree is compact: only leaves have
    a single reference. A path is therefore no longer than the number of sequences.

    Wrong use raises `ValueError`, or `KeyError` for an unknown sequence, and changes nothing. One thread.
    """

    def __init__(self, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            raise ValueError(f"a KV cache of {capacity_tokens} tokens holds nothing; give it at least 1")
        self.capacity_tokens = capacity_tokens
        self._root = _Segment(None, 0, 0, 0)
        self._sequences: dict[int, _Sequence] = {}
        self._used = 0
        self._reserved = 0
        self._retained = 0

    @property
    def used(self) -> int:
        """Cells that are referenced at all, shared ones counted once. O(1)."""
        return self._used

    @property
    def reserved(self) -> int:
        """Cells that live sequences may still compute. O(1)."""
        return self._reserved

    @property
    def retained(self) -> int:
        """The part of `used` that no live sequence references. O(1)."""
        return self._retained

    def length(self, seq: int) -> int:
        """Tokens of a sequence, shared ones included. O(1)."""
        return self._sequences[seq].length

    def start(self, seq: int, *, shared_from: int | None, shared_tokens: int, worst_case_tokens: int) -> None:
        """Begin a live sequence with the first `shared_tokens` tokens of another, live or retained.

        Reserves worst_case_tokens - shared_tokens cells, whether they fit or not: a caller may start first, so that
        the shared cells are held, and then remove retained sequences to make room. O(segments of the two sequences).
        """
        if seq in self._sequences:
            raise ValueError(f"sequence {seq} is there already; remove it first")
        available = 0 if shared_from is None else self._sequences[shared_from].length
        if not 0 <= shared_tokens <= available:
            raise ValueError(f"cannot share {shared_tokens} tokens of sequence {shared_from}, which has {available}")
        if worst_case_tokens < shared_tokens:
            raise ValueError(f"a worst case of {worst_case_tokens} tokens is below the {shared_tokens} shared ones")
        parent = self._root if shared_from is None else self._segment_ending_at(shared_from, shared_tokens)
        tail = _Segment(parent, 0, 0, 0)
        parent.children.add(tail)
        reserved = worst_case_tokens - shared_tokens
        self._sequences[seq] = _Sequence(tail, shared_tokens, reserved)
        self._reserved += reserved
        for segment in self._path(tail):
            if segment.live == 0:
                self._retained -= segment.tokens
            segment.references += 1
            segment.live += 1

    def grow(self, seq: int, tokens: int) -> None:
        """A live sequence computed that many more cells, out of its reservation. O(1)."""
        sequence = self._sequences[seq]
        if not 0 <= tokens <= sequence.reserved:
            raise ValueError(f"sequence {seq} cannot grow by {tokens} tokens; it has {sequence.reserved} reserved")
        sequence.tail.tokens += tokens
        sequence.length += tokens
        sequence.reserved -= tokens
        self._reserved -= tokens
        self._used += tokens

    def retain(self, seq: int) -> None:
        """End a live sequence but keep its cells. O(its segments)."""
        sequence = self._sequences[seq]
        if not sequence.live:
            raise ValueError(f"sequence {seq} is retained already; share from it or remove it")
        self._reserved -= sequence.reserved
        sequence.reserved = 0
        sequence.live = False
        for segment in self._path(sequence.tail):
            segment.live -= 1
            if segment.live == 0:
                self._retained += segment.tokens

    def remove(self, seq: int) -> None:
        """End a sequence, live or retained, and free the cells that nobody else references. O(its segments)."""
        if self._sequences[seq].live:
            self.retain(seq)
        self._let_go(self._sequences.pop(seq).tail, self._root)

    def truncate(self, seq: int, length: int) -> None:
        """Cut a retained sequence to its first tokens and free the cells that nobody else references. O(its segments).

        A live one cannot shrink: what is reserved for it counts from its length.
        """
        sequence = self._sequences[seq]
        if sequence.live:
            raise ValueError(f"sequence {seq} is live; retain it before it is cut")
        if not 0 <= length <= sequence.length:
            raise ValueError(f"sequence {seq} cannot be cut to {length} tokens; it has {sequence.length}")
        kept = self._segment_ending_at(seq, length)
        cut = sequence.tail
        sequence.tail = _Segment(kept, 0, 1, 0)
        sequence.length = length
        kept.children.add(sequence.tail)
        self._let_go(cut, kept)

    def check_integrity(self) -> None:
        """Recount everything. Raises `AssertionError` naming the invariant that does not hold."""
        references: dict[_Segment, int] = {}
        live: dict[_Segment, int] = {}
        for seq, sequence in self._sequences.items():
            assert not sequence.tail.children, f"sequence {seq}: others hang below its tail, it could not grow"
            assert sequence.live or not sequence.reserved, f"sequence {seq}: retained with a reservation"
            assert sequence.reserved >= 0, f"sequence {seq}: reservation {sequence.reserved}"
            length = 0
            for segment in self._path(sequence.tail):
                references[segment] = references.get(segment, 0) + 1
                live[segment] = live.get(segment, 0) + sequence.live
                length += segment.tokens
            assert length == sequence.length, f"sequence {seq}: length {sequence.length}, its segments have {length}"
        tails = {sequence.tail for sequence in self._sequences.values()}
        assert len(tails) == len(self._sequences), "two sequences have the same tail"
        pending = list(self._root.children)
        used = retained = segments = 0
        while pending:
            segment = pending.pop()
            count = references.get(segment, 0)
            assert count, f"a segment of {segment.tokens} tokens has no sequence"
            assert segment.references == count, f"a segment counts {segment.references} references and has {count}"
            assert segment.live == live[segment], f"a segment counts {segment.live} live and has {live[segment]}"
            assert segment in tails or len(segment.children) > 1, "a segment was not merged with its only child"
            assert segment in tails or segment.tokens > 0, "an empty segment is no tail"
            for child in segment.children:
                assert child.parent is segment, "a segment's child has another parent"
            used += segment.tokens
            retained += 0 if segment.live else segment.tokens
            segments += 1
            pending += segment.children
        reserved = sum(sequence.reserved for sequence in self._sequences.values())
        assert segments == len(references), "some sequences hang outside the tree"
        assert used == self._used, f"used is {self._used}, the segments have {used}"
        assert retained == self._retained, f"retained is {self._retained}, the segments have {retained}"
        assert reserved == self._reserved, f"reserved is {self._reserved}, the sequences have {reserved}"

    def _let_go(self, tail: _Segment, kept: _Segment) -> None:
        """Free a retained tail, and take its reference from the segments between it and `kept`, which is above it."""
        assert tail.parent is not None
        for segment in self._path(tail):
            if segment is kept:
                break
            segment.references -= 1
        self._used -= tail.tokens
        self._retained -= tail.tokens
        tail.parent.children.remove(tail)
        # Higher up, a segment that lost this reference branches as before.
        self._merge_into_only_child(tail.parent)

    def _path(self, segment: _Segment) -> Iterator[_Segment]:
        """From a segment up to, but not including, the root."""
        while segment.parent is not None:
            yield segment
            segment = segment.parent

    def _segment_ending_at(self, seq: int, position: int) -> _Segment:
        """A segment, never a tail, that ends `position` tokens into a sequence; one is split where there is none."""
        sequence = self._sequences[seq]
        end = sequence.length
        for segment in self._path(sequence.tail):
            start = end - segment.tokens
            if start < position:
                is_boundary = position == end and segment is not sequence.tail
                return segment if is_boundary else self._upper_part(segment, position - start)
            end = start
        return self._root

    def _upper_part(self, segment: _Segment, tokens: int) -> _Segment:
        """Split off a segment's first tokens; the segment keeps the rest, which may be none, and stays who it was."""
        assert segment.parent is not None
        upper = _Segment(segment.parent, tokens, segment.references, segment.live, {segment})
        segment.parent.children.remove(segment)
        segment.parent.children.add(upper)
        segment.parent = upper
        segment.tokens -= tokens
        return upper

    def _merge_into_only_child(self, segment: _Segment) -> None:
        """Keep the tree compact. The child stays who it was, so no tail changes."""
        if segment.parent is None or len(segment.children) != 1:
            return
        (child,) = segment.children
        child.tokens += segment.tokens
        child.parent = segment.parent
        segment.parent.children.remove(segment)
        segment.parent.children.add(child)
