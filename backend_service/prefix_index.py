"""Which token prefixes are resident, and who holds them: a radix tree that a probe can read at any moment."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

PACKED = "I"
"""Unsigned 32-bit, as on the wire. Slices of arrays are compared without touching a Python object: many
times faster than slices of lists, which pays for packing a prompt once, outside the lock."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest resident prefix of some tokens."""

    length: int
    """In tokens."""
    owners: frozenset[int]
    """Everybody who holds all of it; empty when length is 0."""


class _Node:
    """An edge and what lies below it. Its owners are those whose path runs through the whole edge."""

    __slots__ = ("children", "edge", "owners", "parent")

    def __init__(self, parent: _Node | None, edge: array[int], owners: set[int]) -> None:
        self.parent = parent
        self.edge = edge
        self.owners = owners
        self.children: dict[int, _Node] = {}


class PrefixIndex:
    """Token sequences by owner, common prefixes stored once.

    Every owner's sequence is the path from the root to one node, its tail. The tree is compact: no child of a node
    other than the root has the same owners as the node, so a node with a single owner is a leaf. The root itself
    belongs to nobody, which exempts it from every rule about owners.

    Any thread may call; a lock is held for one operation on packed tokens, tens of microseconds at most. Owners are
    the caller's handles, any ints. Tokens outside 0 .. 2**32 - 1 raise `OverflowError` and change nothing.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._root = _Node(None, array(PACKED), set())
        self._tails: dict[int, _Node] = {}
        self._total_tokens = 0

    @property
    def owners(self) -> frozenset[int]:
        """Everybody in the index, those with an empty sequence included."""
        with self._lock:
            return frozenset(self._tails)

    @property
    def total_tokens(self) -> int:
        """Tokens in the tree, common prefixes counted once. O(1)."""
        return self._total_tokens

    def insert(self, owner: int, tokens: Sequence[int]) -> None:
        """Add an owner and its sequence, which may be empty. Raises `ValueError` when the owner is there already."""
        packed = array(PACKED, tokens)
        with self._lock:
            if owner in self._tails:
                raise ValueError(f"owner {owner} is in the index already; remove it first, or extend it")
            self._tails[owner] = self._root
            self._append(owner, packed)

    def extend(self, owner: int, tokens: Sequence[int]) -> None:
        """Append to an owner's sequence; amortised O(len(tokens)) while nobody shares its end.

        Raises `KeyError` for an unknown owner.
        """
        packed = array(PACKED, tokens)
        with self._lock:
            self._append(owner, packed)

    def remove(self, owner: int) -> None:
        """Forget an owner and the tokens that only it held. Raises `KeyError` for an unknown owner."""
        with self._lock:
            self._cut(owner, 0)
            del self._tails[owner]

    def truncate(self, owner: int, length: int) -> None:
        """Cut an owner's sequence to its first tokens, in one step for everybody who looks.

        Raises `KeyError` for an unknown owner, `ValueError` where it has fewer tokens.
        """
        with self._lock:
            self._cut(owner, length)

    def sole_tokens(self, owner: int) -> int:
        """Tokens at the end of an owner's sequence that nobody else holds; 0 when others hold all of it. O(1).

        Raises `KeyError` for an unknown owner.
        """
        with self._lock:
            tail = self._tails[owner]
            return len(tail.edge) if len(tail.owners) == 1 else 0

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest prefix of `tokens` that lies on any path, ending inside an edge or not. Changes nothing."""
        packed = array(PACKED, tokens)
        with self._lock:
            node, length = self._root, 0
            while length < len(packed) and (child := node.children.get(packed[length])) is not None:
                node = child
                common = common_prefix(node.edge, packed[length : length + len(node.edge)])
                length += common
                if common < len(node.edge):
                    break
            return Match(length, frozenset(node.owners))

    def tokens_of(self, owner: int) -> list[int]:
        """An owner's whole sequence. Raises `KeyError` for an unknown owner."""
        with self._lock:
            edges = [node.edge for node in _path(self._tails[owner])]
            return [token for edge in reversed(edges) for token in edge]

    def check_integrity(self) -> None:
        """Walk the whole tree. Raises `AssertionError` naming the invariant that does not hold."""
        with self._lock:
            ends: dict[int, set[int]] = {}
            for owner, tail in self._tails.items():
                ends.setdefault(id(tail), set()).add(owner)
            seen_tokens = 0
            assert not self._root.edge, "the root has an edge"
            assert not self._root.owners, f"the root has owners {self._root.owners}"
            reached = ends.pop(id(self._root), set())
            pending = [self._root]
            while pending:
                node = pending.pop()
                where = f"node at {node.edge[:4].tolist()}..."
                below: list[int] = []
                for token, child in node.children.items():
                    assert child.parent is node, f"{where}: the child at token {token} has another parent"
                    assert child.edge, f"{where}: the child at token {token} has an empty edge"
                    assert child.edge[0] == token, f"{where}: the child at {token} starts with {child.edge[0]}"
                    assert child.owners, f"{where}: the child at token {token} has no owner"
                    assert child.owners != node.owners, f"{where}: not merged with its child at token {token}"
                    seen_tokens += len(child.edge)
                    below += child.owners
                    pending.append(child)
                if node is not self._root:
                    here = ends.pop(id(node), set())
                    reached |= here
                    assert len(below) == len(set(below)), f"{where}: an owner goes on in two children"
                    assert not here & set(below), f"{where}: an owner ends here and goes on in a child"
                    assert here | set(below) == node.owners, f"{where}: owners {node.owners} are not those below it"
            assert not ends, f"owners {sorted(set().union(*ends.values()))} end at nodes outside the tree"
            assert reached == set(self._tails), "some owners were not reached from the root"
            assert seen_tokens == self._total_tokens, (
                f"total_tokens is {self._total_tokens}, the tree has {seen_tokens}"
            )

    def _append(self, owner: int, tokens: array[int]) -> None:
        while tokens:
            tail = self._tails[owner]
            if len(tail.owners) == 1:
                tail.edge.extend(tokens)
                self._total_tokens += len(tokens)
                return
            child = tail.children.get(tokens[0])
            if child is None:
                child = _Node(tail, tokens, {owner})
                tail.children[tokens[0]] = child
                self._total_tokens += len(tokens)
                common = len(tokens)
            else:
                common = common_prefix(child.edge, tokens)
                child = self._upper_part(child, common)
                child.owners.add(owner)
            self._tails[owner] = child
            self._absorb_only_child(tail)
            tokens = tokens[common:]

    def _cut(self, owner: int, length: int) -> None:
        tail = node = self._tails[owner]
        end = sum(len(above.edge) for above in _path(tail))
        if not 0 <= length <= end:
            raise ValueError(f"owner {owner} cannot be cut to {length} tokens; it has {end}")
        if length == end:
            return
        while end > length and (start := end - len(node.edge)) >= length:
            assert node.parent is not None
            node.owners.remove(owner)
            node, end = node.parent, start
        self._tails[owner] = node
        if end > length:
            self._tails[owner] = self._upper_part(node, len(node.edge) - (end - length))
            node.owners.remove(owner)
        if not tail.owners:
            # It had one owner, hence was a leaf, and nothing above it had one owner.
            assert tail.parent is not None
            del tail.parent.children[tail.edge[0]]
            self._total_tokens -= len(tail.edge)
            tail = tail.parent
        # Further up every node lost the same owner as its child on the path, so they differ as before.
        self._absorb_only_child(tail)

    def _upper_part(self, node: _Node, length: int) -> _Node:
        """The node that ends `length` tokens into `node`'s edge; `node` keeps the rest, and its tails."""
        if length == len(node.edge):
            return node
        assert node.parent is not None
        upper = _Node(node.parent, node.edge[:length], set(node.owners))
        node.parent.children[upper.edge[0]] = upper
        del node.edge[:length]
        upper.children[node.edge[0]] = node
        node.parent = upper
        return upper

    def _absorb_only_child(self, node: _Node) -> None:
        """Keep the tree compact: equal owners above and below mean that nobody ends or turns off between."""
        if len(node.children) != 1:
            return
        (child,) = node.children.values()
        if len(child.owners) != len(node.owners):
            return
        node.edge.extend(child.edge)
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        for owner in child.owners:
            if self._tails[owner] is child:
                self._tails[owner] = node


def _path(node: _Node | None) -> Iterator[_Node]:
    """From a node up to the root, which has an empty edge."""
    while node is not None:
        yield node
        node = node.parent


def common_prefix(left: array[int], right: array[int]) -> int:
    """Leading tokens that both arrays (of type `PACKED`) have in common, found by bisection over slices."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # equal before `low`, different before `high`
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
