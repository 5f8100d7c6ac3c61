"""When requests arrive."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phaseroute.scenarios.bounds import BadScenario, Bounded, bounded, parse

LEAST_RATE, MOST_RATE = 1e-4, 1e6
LONGEST_S = 86_400.0
TRACE_PREFIX = "trace:"


class Arrivals(Protocol):
    """A process that can be drawn from."""

    def times(self, count: int, rng: random.Random) -> Iterator[float]:
        """Seconds since the start of the scenario of the first `count` arrivals, in order."""


@dataclass(frozen=True, slots=True)
class Gap(Bounded):
    """One every `gap_s` seconds, the first at 0; a gap of 0: all at once."""

    gap_s: float = bounded(0, LONGEST_S)

    def times(self, count: int, rng: random.Random) -> Iterator[float]:
        """See `Arrivals`; nothing is drawn."""
        return (index * self.gap_s for index in range(count))


@dataclass(frozen=True, slots=True)
class Poisson(Bounded):
    """Independent of each other, `rate` a second on average."""

    rate: float = bounded(LEAST_RATE, MOST_RATE)

    def times(self, count: int, rng: random.Random) -> Iterator[float]:
        """See `Arrivals`."""
        return itertools.accumulate(rng.expovariate(self.rate) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Gamma(Bounded):
    """Gaps follow a gamma distribution: `rate` a second on average, with a coefficient of variation (standard deviation
    over mean) of `cv`. 1 is a Poisson process, less is more even, more comes in bursts."""

    rate: float = bounded(LEAST_RATE, MOST_RATE)
    cv: float = bounded(0.01, 100)

    def times(self, count: int, rng: random.Random) -> Iterator[float]:
        """See `Arrivals`. Shape 1 / cv^2 and scale cv^2 / rate have this mean and this variation."""
        square = self.cv**2
        return itertools.accumulate(rng.gammavariate(1 / square, square / self.rate) for _ in range(count))


@dataclass(frozen=True, slots=True)
class OnOff(Bounded):
    """A Poisson process of `rate` a second that runs for `on` seconds, then rests for `off` seconds, and so on."""

    rate: float = bounded(LEAST_RATE, MOST_RATE)
    on: float = bounded(1e-3, LONGEST_S)
    off: float = bounded(0, LONGEST_S)

    def times(self, count: int, rng: random.Random) -> Iterator[float]:
        """See `Arrivals`. Drawn on a clock that runs while it is on."""
        for running_s in Poisson(self.rate).times(count, rng):
            yield running_s + math.floor(running_s / self.on) * self.off


@dataclass(frozen=True, slots=True)
class Recorded:
    """As they once came."""

    at_s: tuple[float, ...]
    """In order."""

    def times(self, count: int, rng: random.Random) -> Iterator[float]:
        """See `Arrivals`; nothing is drawn. Raises `BadScenario` for more than were recorded."""
        if count > len(self.at_s):
            raise BadScenario(
                f"{count} requests are asked for, but {len(self.at_s)} arrivals were recorded; ask for fewer"
            )
        return iter(self.at_s[:count])


KINDS: Mapping[str, type[Gap | Poisson | Gamma | OnOff]] = {
    "gap": Gap,
    "poisson": Poisson,
    "gamma": Gamma,
    "onoff": OnOff,
}


def parse_arrivals(text: str) -> Arrivals:
    """From "gap:0.05", "poisson:rate=1", "gamma:rate=1,cv=4", "onoff:rate=4,on=10,off=20", or "trace:FILE" for the
    times of a recorded trace. Raises `BadScenario` that names the value and the allowed range."""
    if text.startswith(TRACE_PREFIX):
        from phaseroute.scenarios.trace import read_trace

        scenario = read_trace(Path(text.removeprefix(TRACE_PREFIX)))
        return Recorded(tuple(planned.at_s for planned in scenario.requests))
    return parse("arrivals", text, KINDS)
