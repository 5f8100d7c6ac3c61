"""Requests that are likely to come, from the pace at which they came lately.

A forecast that knows nothing of what is still to come is too good: in a burst the batch fills up behind each request,
and its steps take longer. So it reckons with a few more requests like the present one, at the gap of the last ones: as
many as came since the last pause (what has gone on for a while will go on for about as long), `MOST_COMING` at most.
They go where the last ones went. They weigh nothing themselves.
"""

from __future__ import annotations

from collections import deque

MOST_COMING = 3
"""More make forecasts of the first requests of a short burst worse than those of a long one better."""
PAUSE_S = 5.0
"""After so long without a request nothing is expected."""
_GAPS = 8
"""Over which the mean gap is taken, and decisions over which a backend's share is."""


class Arrivals:
    """Times are passed in. O(1) memory."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_GAPS + 1)
        self._since_pause = 0
        self._sent_to: deque[str] = deque(maxlen=_GAPS)

    def note(self, now_s: float) -> None:
        """A request has come."""
        if self._times and now_s - self._times[-1] > PAUSE_S:
            self._times.clear()
            self._since_pause = 0
        self._times.append(now_s)
        self._since_pause += 1

    def sent(self, backend: str) -> None:
        """It was sent there."""
        self._sent_to.append(backend)

    def coming_in_s(self, backend: str) -> tuple[float, ...]:
        """In how many seconds from the last arrival requests are expected at a backend."""
        if len(self._times) < 2 or not self._sent_to:
            return ()
        gap_s = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        sent, all_ = self._sent_to.count(backend), len(self._sent_to)
        count = min(self._since_pause, MOST_COMING)
        # The nth request is the backend's when its share of n reaches the next whole number.
        return tuple(n * gap_s for n in range(1, count + 1) if n * sent // all_ > (n - 1) * sent // all_)
