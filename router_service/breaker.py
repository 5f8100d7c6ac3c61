"""Whether a backend that says it serves also answers: a state machine for each, without clock or wire."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

COUNTED = frozenset({"UNAVAILABLE", "INTERNAL", "UNKNOWN"})
"""Names of the status codes that are the backend's own failures. Any other is the request's, the client's or the
queue's: it says nothing against the backend, and nothing for it."""


class BreakerState(Enum):
    """As on the wire."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and for how long."""

    failures: int = 3
    """In a row, without an answer between them."""
    open_s: float = 1.0
    """The first time; doubles each time that the request after it fails too."""
    max_open_s: float = 30.0
    jitter: float = 0.2
    """A random part of up to this share is added, else several routers would all come back at once."""
    trial_s: float = 10.0
    """A trial that has said nothing for so long is no longer waited for: another request may go there."""


@dataclass(frozen=True, slots=True)
class BreakerView:
    """A breaker at one moment, for showing it."""

    state: BreakerState
    failures: int
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class _Trial:
    attempt_id: str
    until_s: float


class Breaker:
    """Closed until `failures` in a row, then open; when that time is over, half-open: one request at a time may go
    there, and the first to be answered closes it. Never stuck: a trial's place is free when it is over, or after
    `trial_s`. Times are on the caller's clock."""

    def __init__(self, limits: BreakerLimits, rng: random.Random) -> None:
        self._limits = limits
        self._rng = rng
        self.failures = 0
        """Since the last answer."""
        self._open_s = 0.0
        """How long it was opened for last, without jitter; 0: it is closed."""
        self._until_s = 0.0
        self._trial: _Trial | None = None

    def state(self, now_s: float) -> BreakerState:
        """What it is now."""
        if not self._open_s:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._until_s else BreakerState.HALF_OPEN

    def view(self, now_s: float) -> BreakerView:
        """For showing it."""
        return BreakerView(self.state(now_s), self.failures, self.retry_in_s(now_s))

    def retry_in_s(self, now_s: float) -> float:
        """Until a request may go there; 0 where one may."""
        if not self._open_s:
            return 0.0
        trial_until_s = self._trial.until_s if self._trial else 0.0
        return max(0.0, self._until_s - now_s, trial_until_s - now_s)

    def refusal(self, now_s: float) -> str:
        """Why no request goes there now, and when one may; empty when one may."""
        if not self._open_s:
            return ""
        wait_s = self.retry_in_s(now_s)
        if not wait_s:
            return ""
        if now_s < self._until_s:
            return f"failed {self.failures} times without an answer; it is tried again in {wait_s:.1f} s"
        return f"failed {self.failures} times; one request tries it now, another may in {wait_s:.1f} s at the latest"

    @property
    def trial(self) -> str | None:
        """The attempt that tries it."""
        return self._trial.attempt_id if self._trial else None

    def booked(self, attempt_id: str, now_s: float) -> None:
        """A request goes there. The first one after the open time takes the place, later ones that were sent all the
        same do not."""
        if self.state(now_s) is BreakerState.HALF_OPEN and (self._trial is None or now_s >= self._trial.until_s):
            self._trial = _Trial(attempt_id, now_s + self._limits.trial_s)

    def over(self, attempt_id: str) -> None:
        """An attempt has ended, however that was."""
        if self.trial == attempt_id:
            self._trial = None

    def answered(self) -> None:
        """It answered a request: closed, whatever was before."""
        self.restarted()

    def restarted(self) -> None:
        """Another process is there, of which nothing bad is known."""
        self.failures = 0
        self._open_s = self._until_s = 0.0
        self._trial = None

    def failed(self, code: str, now_s: float) -> None:
        """An attempt there ended with a status code of this name. While it is open nothing changes but the count: those
        that fail then were sent before."""
        if code not in COUNTED:
            return
        self.failures += 1
        if self.state(now_s) is BreakerState.HALF_OPEN:
            self._open(min(2 * self._open_s, self._limits.max_open_s), now_s)
        elif not self._open_s and self.failures >= self._limits.failures:
            self._open(min(self._limits.open_s, self._limits.max_open_s), now_s)

    def _open(self, seconds: float, now_s: float) -> None:
        self._open_s = seconds
        self._until_s = now_s + seconds * (1 + self._limits.jitter * self._rng.random())
        self._trial = None
