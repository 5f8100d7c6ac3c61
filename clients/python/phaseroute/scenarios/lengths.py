"""How long prompts and answers are."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from phaseroute.scenarios.bounds import MOST_TOKENS, BadScenario, Bounded, bounded, parse


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: random.Random) -> int:
        """One of them; 1 at least."""


@dataclass(frozen=True, slots=True)
class Fixed(Bounded):
    """Always as many."""

    tokens: int = bounded(1, MOST_TOKENS)

    def draw(self, rng: random.Random) -> int:
        """See `Lengths`; nothing is drawn."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform(Bounded):
    """Any from `low` to `high`, both included, equally likely."""

    low: int = bounded(1, MOST_TOKENS)
    high: int = bounded(1, MOST_TOKENS)

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        if self.high < self.low:
            raise BadScenario(f"uniform: high is {self.high}; give low, which is {self.low}, or more")

    def draw(self, rng: random.Random) -> int:
        """See `Lengths`."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal(Bounded):
    """Half are below `median`; the logarithm has a standard deviation of `sigma`. Cut off at `max`."""

    median: float = bounded(1, MOST_TOKENS)
    sigma: float = bounded(0, 5)
    max: int = bounded(1, MOST_TOKENS, default=MOST_TOKENS)

    def draw(self, rng: random.Random) -> int:
        """See `Lengths`."""
        return _within(rng.lognormvariate(math.log(self.median), self.sigma), self.max)


@dataclass(frozen=True, slots=True)
class Geometric(Bounded):
    """As if an answer ended after each token with equal chance: `mean` tokens on average, less what `max` cuts off."""

    mean: float = bounded(1, MOST_TOKENS)
    max: int = bounded(1, MOST_TOKENS, default=MOST_TOKENS)

    def draw(self, rng: random.Random) -> int:
        """See `Lengths`. 1 + floor(e / -log(1 - p)), with e exponential and p = 1 / mean."""
        if self.mean == 1:
            return 1
        return _within(1 + math.floor(rng.expovariate(1.0) / -math.log1p(-1 / self.mean)), self.max)


KINDS: Mapping[str, type[Fixed | Uniform | Lognormal | Geometric]] = {
    "fixed": Fixed,
    "uniform": Uniform,
    "lognormal": Lognormal,
    "geometric": Geometric,
}


def parse_lengths(what: str, text: str) -> Lengths:
    """From "128", "uniform:low=16,high=128", "lognormal:median=40,sigma=0.6,max=127" or "geometric:mean=60,max=127".
    `what` they are of, in messages. Raises `BadScenario` that names the value and the allowed range."""
    return parse(what, f"fixed:{text}" if text[:1].isdigit() or text[:1] in "+-." else text, KINDS)


def _within(tokens: float, most: int) -> int:
    return max(1, min(most, round(min(tokens, float(most)))))
