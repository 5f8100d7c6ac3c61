"""Requests that are likely to come, from the pace at which they came lately.

A forecast that knows nothing of what is still to come is too good: in a burst the batch fills up behind each request,
and its steps take longer. So it reckons with a few more requests like the present one, `MOST_COMING` at most: as many
as earlier spells (requests with no pause between them) of at least the present length had left at this point. Where no
spell was so long, as many as came in this one: what has gone on for a while will go on for about as long. Their gap is
that of the last ones; for the first of a spell, that of earlier spells. They go where the last ones went, and weigh
nothing themselves.
"""

from __future__ import annotations

from collections import deque
from statistics import median, median_low

MOST_COMING = 3
"""More make forecasts of the first requests of a short burst worse than those of a long one better."""
PAUSE_S = 5.0
"""A spell is over after so long without a request."""
_GAPS = 8
"""Over which the mean gap is taken, and decisions over which a backend's share is."""
_SPELLS = 8
"""Earlier spells that are remembered."""


class Arrivals:
    """Times are passed in. O(1) memory."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_GAPS + 1)
        self._length = 0
        """Of the present spell."""
        self._spells: deque[tuple[int, float | None]] = deque(maxlen=_SPELLS)
        """(length, mean gap) of earlier ones; a single request has no gap."""
        self._sent_to: deque[str] = deque(maxlen=_GAPS)

    def note(self, now_s: float) -> None:
        """A request has come."""
        if self._times and now_s - self._times[-1] > PAUSE_S:
            self._spells.append((self._length, self._gap_s()))
            self._times.clear()
            self._length = 0
        self._times.append(now_s)
        self._length += 1

    def sent(self, backend: str) -> None:
        """It was sent there."""
        self._sent_to.append(backend)

    def coming_in_s(self, backend: str) -> tuple[float, ...]:
        """In how many seconds from the last arrival requests are expected at a backend."""
        gap_s = self._expected_gap_s()
        if gap_s is None or not self._sent_to:
            return ()
        sent, all_ = self._sent_to.count(backend), len(self._sent_to)
        # The nth request is the backend's when its share of n reaches the next whole number.
        return tuple(n * gap_s for n in range(1, self._expected() + 1) if n * sent // all_ > (n - 1) * sent // all_)

    def _expected(self) -> int:
        left = [length - self._length for length, _ in self._spells if length >= self._length]
        return min(MOST_COMING, median_low(left) if left else self._length)

    def _gap_s(self) -> float | None:
        if len(self._times) < 2:
            return None
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

    def _expected_gap_s(self) -> float | None:
        gap_s = self._gap_s()
        if gap_s is not None:
            return gap_s
        known = [gap for _, gap in self._spells if gap is not None]
        return median(known) if known else None
