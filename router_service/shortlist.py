"""Of a wide fleet, the few backends that are worth a probe and a forecast."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

_MAX_S = 1e9
"""Longer than that nothing takes: a figure beyond it is nonsense, like one below 0."""


class Shortlist:
    """A rough price of one more request on every backend, kept in arrays:

        max(0, backlog - time since) + booked since + prefill tokens * prefill_token + new tokens * decode_token

    in seconds. A backend is no candidate before its first `set` and after `remove`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Raises `ValueError` when a name stands there twice."""
        self._names = list(names)
        self._places = {name: place for place, name in enumerate(self._names)}
        if len(self._places) < len(self._names):
            raise ValueError("the backends of a shortlist need names of their own; rename those that stand twice")
        count = len(self._names)
        self._empty_s = np.full(count, np.nan)
        """When the backlog will be done; infinite where there is no price, NaN where there is no candidate."""
        self._booked_s = np.zeros(count)
        self._prefill_token_s = np.zeros(count)
        self._decode_token_s = np.zeros(count)

    def set(self, name: str, *, backlog_s: float, at_s: float, prefill_token_s: float, decode_token_s: float) -> None:
        """A backend's work as of `at_s`, which forgets what was booked, and what a token of one more request takes.

        With times that are negative, infinite or NaN it has no price. Raises `KeyError` for a name not given at first.
        """
        place = self._places[name]
        priced = (
            0 <= backlog_s <= _MAX_S
            and 0 <= prefill_token_s <= _MAX_S
            and 0 <= decode_token_s <= _MAX_S
            and -_MAX_S <= at_s <= _MAX_S
        )
        self._empty_s[place] = at_s + backlog_s if priced else np.inf
        self._prefill_token_s[place] = prefill_token_s if priced else 0.0
        self._decode_token_s[place] = decode_token_s if priced else 0.0
        self._booked_s[place] = 0.0

    def remove(self, name: str) -> None:
        """It is no candidate until the next `set`. Raises `KeyError` for a name not given at first."""
        self._empty_s[self._places[name]] = np.nan

    def book(self, name: str, seconds: float) -> None:
        """Count work that was sent there, until the next `set` says what waits. Raises `KeyError` for a name not given
        at first.

        It does not pass with time like the backlog: on a backend that has been idle for a while it counts in full.
        """
        if 0 <= seconds <= _MAX_S:
            self._booked_s[self._places[name]] += seconds

    def pick(
        self,
        count: int,
        *,
        prefill_tokens: float,
        new_tokens: float,
        now_s: float,
        always: Collection[str] = (),
        rng: random.Random,
    ) -> list[str]:
        """The `count` candidates of the lowest prices, in no order; then those of `always` that are candidates and not
        among them, from its first `count`.

        Equal prices are drawn from at random, else several routers would all pick the same of many idle backends.
        Candidates without a price come in through `always` alone, unless no candidate has one. `prefill_tokens` and
        `new_tokens` are the request's, 0 or more; `now_s` is on the clock of `at_s`.
        """
        price_s = np.maximum(self._empty_s - now_s, 0.0)
        price_s += self._booked_s
        price_s += prefill_tokens * self._prefill_token_s
        price_s += new_tokens * self._decode_token_s
        picked = self._lowest(price_s, count, rng)
        listed = [place for name in always if (place := self._places.get(name)) is not None]
        known = [place for place in dict.fromkeys(listed) if not np.isnan(price_s[place])]
        picked += [place for place in known[:count] if place not in picked]
        return [self._names[place] for place in picked]

    def _lowest(self, price_s: NDArray[np.float64], count: int, rng: random.Random) -> list[int]:
        """Places of the lowest prices, in no order."""
        count = min(count, len(price_s))
        if count < 1:
            return []
        # Infinite comes after all prices there, and NaN after that.
        bar_s = float(np.partition(price_s, count - 1)[count - 1])
        if math.isnan(bar_s):
            bar_s = math.inf
        below: list[int] = np.flatnonzero(price_s < bar_s).tolist()
        if below and bar_s == math.inf:
            return below
        level = np.flatnonzero(price_s == bar_s)
        drawn = rng.sample(range(len(level)), min(count - len(below), len(level)))
        return below + [int(level[index]) for index in drawn]
