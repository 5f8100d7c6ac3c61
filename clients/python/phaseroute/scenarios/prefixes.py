"""Which prompts begin alike."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from phaseroute.scenarios.bounds import MOST_TOKENS, Bounded, bounded, parse

MOST_PREFIXES = 100_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with what it shares; see `Planned`."""

    tokens: int
    prefix: int = -1
    prefix_tokens: int = 0


class Prefixes(Protocol):
    """A pattern of sharing."""

    @property
    def warm(self) -> tuple[int, ...]:
        """Prefixes that every backend holds before the first arrival."""

    def share(self, lengths: Iterable[int], rng: random.Random) -> Iterator[Prompt]:
        """Prompts of these lengths, in order of arrival. At least the last token of a prompt is its own."""


@dataclass(frozen=True, slots=True)
class Unshared(Bounded):
    """Every prompt is new."""

    @property
    def warm(self) -> tuple[int, ...]:
        """None."""
        return ()

    def share(self, lengths: Iterable[int], rng: random.Random) -> Iterator[Prompt]:
        """See `Prefixes`."""
        return map(Prompt, lengths)


@dataclass(frozen=True, slots=True)
class Shared(Bounded):
    """All begin with the same `tokens` tokens, which every backend holds at the start unless `held` is 0."""

    tokens: int = bounded(1, MOST_TOKENS)
    held: int = bounded(0, 1, default=1)

    @property
    def warm(self) -> tuple[int, ...]:
        """The one that there is."""
        return (0,) if self.held else ()

    def share(self, lengths: Iterable[int], rng: random.Random) -> Iterator[Prompt]:
        """See `Prefixes`."""
        return (_prompt(length, 0, self.tokens) for length in lengths)


@dataclass(frozen=True, slots=True)
class Pool(Bounded):
    """A request begins with one of `prefixes` known beginnings of `tokens` tokens with a chance of `hit_rate`, else it
    is all new. Known ones are taken by Zipf's law: the n-th in proportion to n^-skew; skew 0: all alike.

    `hit_rate` is what caches could save at most: no backend holds a prefix before its first request with it, unless
    `held` is 1; and a cache may have let it go since.
    """

    prefixes: int = bounded(1, MOST_PREFIXES)
    tokens: int = bounded(1, MOST_TOKENS)
    hit_rate: float = bounded(0, 1)
    skew: float = bounded(0, 10, default=1.0)
    held: int = bounded(0, 1, default=0)

    @property
    def warm(self) -> tuple[int, ...]:
        """All of them, or none."""
        return tuple(range(self.prefixes)) if self.held else ()

    def share(self, lengths: Iterable[int], rng: random.Random) -> Iterator[Prompt]:
        """See `Prefixes`. A miss draws as much as a hit, so that another hit rate leaves the hits that stay alike."""
        cumulated = list(itertools.accumulate((place + 1) ** -self.skew for place in range(self.prefixes)))
        numbers = range(self.prefixes)
        for length in lengths:
            number = rng.choices(numbers, cum_weights=cumulated)[0]
            yield _prompt(length, number, self.tokens) if rng.random() < self.hit_rate else Prompt(length)


@dataclass(frozen=True, slots=True)
class Turns(Bounded):
    """Conversations: a prompt is the one before it in its conversation plus as many tokens as were drawn for it. There
    are `talks` at a time, each as likely to go on; one that would come to more than `most` tokens is over, and a new
    one takes its place. What a model answered counts as new: its tokens are in no other prompt."""

    talks: int = bounded(1, MOST_PREFIXES)
    most: int = bounded(2, MOST_TOKENS, default=2048)

    @property
    def warm(self) -> tuple[int, ...]:
        """None."""
        return ()

    def share(self, lengths: Iterable[int], rng: random.Random) -> Iterator[Prompt]:
        """See `Prefixes`. All but the last token of a prompt is part of the conversation's text."""
        numbers, told = list(range(self.talks)), [0] * self.talks
        fresh = itertools.count(self.talks)
        for length in lengths:
            talk = rng.randrange(self.talks)
            if told[talk] and told[talk] + length > self.most:
                numbers[talk], told[talk] = next(fresh), 0
            told[talk] += length
            yield _prompt(told[talk], numbers[talk], told[talk] - 1)


KINDS: Mapping[str, type[Unshared | Shared | Pool | Turns]] = {
    "none": Unshared,
    "shared": Shared,
    "pool": Pool,
    "turns": Turns,
}


def parse_prefixes(text: str) -> Prefixes:
    """From "none", "shared:496", "pool:prefixes=20,tokens=400,hit_rate=0.6" or "turns:talks=8". Raises `BadScenario`
    that names the value and the allowed range."""
    return parse("prefixes", text, KINDS)


def _prompt(tokens: int, prefix: int, prefix_tokens: int) -> Prompt:
    shared = min(prefix_tokens, tokens - 1)
    return Prompt(tokens, prefix, shared) if shared else Prompt(tokens)
