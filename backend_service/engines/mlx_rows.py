"""Sequences of the MLX engine that are computed together: a padded KV cache with a row for each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

Caches = list[Any]
"""mlx-lm's KV caches, one a layer; of one sequence, or of a batch."""
Module = Callable[..., mx.array]
"""A model of mlx-lm's: tokens (rows, N) and a cache in, logits (rows, N, vocabulary) out."""


class Rows:
    """A batch. Its caches are mlx-lm's, so any architecture works that mlx-lm batches: rows are padded on the left to
    the longest, and every change of who is in it copies the cache."""

    def __init__(self, handles: list[int], caches: Caches, drawn: mx.array | None = None) -> None:
        self.handles = handles
        self.caches = caches
        self.drawn = drawn
        """(rows,), int32: tokens that were drawn after everything that is computed, and given to nobody yet."""

    @classmethod
    def of(cls, sequences: Mapping[int, Caches]) -> Rows:
        """At least one sequence, from caches of its own, which stay as they are."""
        layers = zip(*sequences.values(), strict=True)
        return cls(list(sequences), [caches[0].merge(list(caches)) for caches in layers])

    def prefill(self, module: Module, chunks: Mapping[int, Sequence[int]]) -> None:
        """Compute these tokens of every row, without drawing any. Lazily; shorter chunks are padded."""
        tokens = [chunks[handle] for handle in self.handles]
        longest = max(map(len, tokens))
        padding = [longest - len(row) for row in tokens]
        padded = any(padding)
        if padded:
            for cache in self.caches:
                cache.prepare(lengths=[len(row) for row in tokens], right_padding=padding)
        ids = [[*row, *([0] * pad)] for row, pad in zip(tokens, padding, strict=True)]
        module(mx.array(ids, mx.int32), cache=self.caches)
        if padded:
            for cache in self.caches:
                cache.finalize()

    def decode(self, module: Module, tokens: mx.array) -> mx.array:
        """Compute one token of every row, (rows,); the logits after it, (rows, vocabulary). Lazily."""
        logits = module(tokens[:, None], cache=self.caches)
        return logits[:, -1, :]

    def join(self, other: Rows) -> None:
        """Take over the rows of another batch, behind these."""
        for mine, others in zip(self.caches, other.caches, strict=True):
            mine.extend(others)
        if self.drawn is not None and other.drawn is not None:
            self.drawn = mx.concatenate([self.drawn, other.drawn])
        else:
            assert self.drawn is other.drawn, "of a batch, either every row has a drawn token or none"
        self.handles += other.handles

    def split(self, handles: Iterable[int]) -> Rows:
        """Move these rows to a batch of their own."""
        wanted = set(handles)
        other = Rows(self.handles, copy.deepcopy(self.caches), self.drawn)  # arrays are shared, not copied
        other._keep([index for index, handle in enumerate(self.handles) if handle in wanted])
        self._keep([index for index, handle in enumerate(self.handles) if handle not in wanted])
        return other

    def extract(self, handle: int, tokens: int) -> Caches:
        """A copy of the first `tokens` tokens of a row, as caches of one sequence. Lazily."""
        index = self.handles.index(handle)
        return cut([cache.extract(index) for cache in self.caches], tokens)

    def lengths(self) -> dict[int, int]:
        """Tokens in the cache by sequence; waits for them."""
        offsets = self.caches[0].offset.tolist()
        return dict(zip(self.handles, offsets, strict=True))

    @property
    def state(self) -> list[Any]:
        """What `mx.eval` waits for."""
        return [cache.state for cache in self.caches]

    def _keep(self, indices: list[int]) -> None:
        self.handles = [self.handles[index] for index in indices]
        for cache in self.caches:
            cache.filter(indices)
        if self.drawn is not None:
            self.drawn = self.drawn[mx.array(indices)]


class Batches:
    """All live sequences: those that were computed in the batches of then, new ones in caches of their own until they
    are computed for the first time, so that several become a batch at once."""

    def __init__(self) -> None:
        self._batches: list[Rows] = []
        self._new: dict[int, Caches] = {}

    def add(self, handle: int, caches: Caches) -> None:
        """A new sequence, and what it shares."""
        self._new[handle] = caches

    def has_drawn(self, handle: int) -> bool:
        """Its next token is drawn already."""
        return handle not in self._new and self._of(handle).drawn is not None

    def extract(self, handle: int, tokens: int) -> Caches:
        """A copy of the first `tokens` tokens of a sequence. Lazily."""
        return cut(self._new[handle], tokens) if handle in self._new else self._of(handle).extract(handle, tokens)

    def lengths(self) -> dict[int, int]:
        """Tokens in the cache by sequence, less those that were computed ahead; waits for them."""
        lengths = {handle: caches[0].offset for handle, caches in self._new.items()}
        for rows in self._batches:
            ahead = rows.drawn is not None
            lengths |= {handle: length - ahead for handle, length in rows.lengths().items()}
        return lengths

    @property
    def handles(self) -> list[int]:
        """Everybody, in any order."""
        return [*self._new, *(handle for rows in self._batches for handle in rows.handles)]

    def gather(self, handles: Iterable[int]) -> Rows:
        """A batch of exactly these sequences, in any order. Nothing is copied where it exists already."""
        wanted = set(handles)
        new = {handle: self._new.pop(handle) for handle in wanted & self._new.keys()}
        pieces = [Rows.of(new)] if new else []
        for rows in tuple(self._batches):
            inside = wanted.intersection(rows.handles)
            if len(inside) == len(rows.handles):
                pieces.append(rows)
                self._batches.remove(rows)
            elif inside:
                pieces.append(rows.split(inside))
        pieces.sort(key=lambda rows: len(rows.handles), reverse=True)
        gathered, *others = pieces
        for rows in others:
            gathered.join(rows)
        self._batches.append(gathered)
        return gathered

    def drop(self, handle: int) -> None:
        """A sequence is over."""
        if self._new.pop(handle, None) is not None:
            return
        rows = self._of(handle)
        if len(rows.handles) == 1:
            self._batches.remove(rows)
        else:
            rows.split([handle])

    def clear(self) -> None:
        """All of them are."""
        self._batches.clear()
        self._new.clear()

    def _of(self, handle: int) -> Rows:
        return next(rows for rows in self._batches if handle in rows.handles)


def cut(caches: Caches, tokens: int) -> Caches:
    """The first `tokens` tokens of a sequence's caches: a copy of the books, not of the data."""
    shorter = copy.deepcopy(caches)
    for cache in shorter:
        cache.trim(cache.offset - tokens)
    return shorter


def compact(caches: Caches) -> Caches:
    """The same without what lies beyond the last token, which a cut leaves behind. Lazily."""
    return [cache.merge([cache]).extract(0) for cache in caches]


def group(chunks: Mapping[int, Sequence[int]], *, padding_tokens: int) -> list[list[int]]:
    """Sequences to be computed in one pass each: the longest chunks first, shorter ones beside them as long as all the
    padding of the pass stays within `padding_tokens`."""
    passes: list[list[int]] = []
    longest = padding = 0
    for handle in sorted(chunks, key=lambda handle: -len(chunks[handle])):
        more = longest - len(chunks[handle])
        if passes and padding + more <= padding_tokens:
            passes[-1].append(handle)
            padding += more
        else:
            passes.append([handle])
            longest, padding = len(chunks[handle]), 0
    return passes
