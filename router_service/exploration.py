"""When a backend is sent a request to learn its speed: when that is unknown or old, rarely, and only requests that have
time to spare."""

from __future__ import annotations

from dataclasses import dataclass

FINISH_MARGIN = 1.5
"""A deadline must leave this multiple of a finish that an old step model predicts."""


@dataclass(frozen=True, slots=True)
class ExplorationLimits:
    """How much of it there may be."""

    max_outstanding: int = 1
    """At a time on one backend. 0: no exploration."""
    per_incarnation: int = 3
    """On one process of a backend whose rates stay unknown all the same."""
    interval_s: float = 30.0
    """Least time between two on one backend."""
    old_after_s: float = 600.0
    """A step model that has seen no step for so long may be wrong by now."""
    slack: float = 3.0
    """A deadline must leave this multiple of the best predicted finish."""


def has_slack(
    *,
    batch: bool,
    deadline_s: float | None,
    best_finish_s: float | None,
    finish_there_s: float | None,
    limits: ExplorationLimits,
) -> bool:
    """Whether a request can afford a backend of unknown speed.

    With a deadline (seconds from now) when it leaves `limits.slack` times the best finish that is predicted anywhere,
    and 1.5 times the one predicted there, where an old step model predicts one. Without a deadline when its priority
    is batch: an interactive request never can. Where no finish is predicted at all, no deadline is known to be late
    enough.
    """
    if deadline_s is None:
        return batch
    if best_finish_s is None or not deadline_s >= limits.slack * best_finish_s:
        return False
    return finish_there_s is None or deadline_s >= FINISH_MARGIN * finish_there_s


@dataclass(frozen=True, slots=True)
class _Sent:
    """What one process of a backend was sent so far."""

    incarnation: str
    requests: int
    last_s: float


class Exploration:
    """Keeps count of what was sent where. Times are the caller's, on one clock in seconds."""

    def __init__(self, limits: ExplorationLimits) -> None:
        self._limits = limits
        self._open: dict[str, str] = {}
        """Backend by attempt."""
        self._sent: dict[str, _Sent] = {}
        """By backend, of its latest incarnation only."""

    def wanted(self, backend: str, incarnation: str, *, priced: bool, model_age_s: float | None, now_s: float) -> str:
        """Why a request should be sent there, as a clause; empty when none should be now. Changes nothing.

        `priced`: it has rates or a step model; `model_age_s` is the model's, None without one. A backend whose rates
        are unknown gets a first request at once.
        """
        why = self._why(priced, model_age_s)
        outstanding = sum(name == backend for name in self._open.values())
        if not why or outstanding >= self._limits.max_outstanding:
            return ""
        sent = self._sent.get(backend)
        if sent is None or sent.incarnation != incarnation:
            return why if priced or self._limits.per_incarnation > 0 else ""
        if now_s - sent.last_s < self._limits.interval_s:
            return ""
        return why if priced or sent.requests < self._limits.per_incarnation else ""

    def begin(self, backend: str, incarnation: str, attempt_id: str, now_s: float) -> None:
        """A request was sent there to explore. Calling it again for an attempt that is not over does nothing."""
        if attempt_id in self._open:
            return
        self._open[attempt_id] = backend
        sent = self._sent.get(backend)
        requests = sent.requests if sent is not None and sent.incarnation == incarnation else 0
        self._sent[backend] = _Sent(incarnation, requests + 1, now_s)

    def end(self, attempt_id: str) -> None:
        """That request is over, however it ended. Attempts that were no exploration, or are over, do nothing."""
        self._open.pop(attempt_id, None)

    def _why(self, priced: bool, model_age_s: float | None) -> str:
        if not priced:
            return "its rates are unknown"
        if model_age_s is not None and model_age_s > self._limits.old_after_s:
            return f"its step model is {model_age_s:.0f} s old"
        return ""
