"""The plug for the order of admission."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from service_kit.requests import Priority


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a policy may know of a waiting request."""

    prefill_tokens: int
    """To be computed before its first token, as far as is known."""
    max_new_tokens: int
    """That may still come."""
    priority: Priority
    arrived_s: float = 0.0
    """On the scheduler's clock."""
    client: str = ""
    """Whose it is; empty: nobody's in particular."""
    weight: float = 1.0
    """Of that client; above 0."""


class QueuePolicy(Protocol):
    """Says when waiting requests are due. The earliest due is admitted first; equals go in order of arrival.

    Nobody starves under any policy: sooner or later whatever arrives goes behind a request that waits.
    """

    name: str
    promote_batch_after_s: float
    """A batch request counts as an interactive one that came so much later; 0: priorities do not count."""

    @property
    def virtual_s(self) -> float | None:
        """Now, on the clock of due times; None: it is the scheduler's clock."""

    def place(self, request_id: str, waiting: Waiting) -> float:
        """When a request is due, finite: one that has arrived, or one that waits and has less left to compute by now,
        which is due no later for it."""

    def leave(self, request_id: str, *, admitted: bool) -> None:
        """It waits no longer: it was admitted, or it was given up."""

    def rest(self) -> None:
        """The backend has nothing to do: what was before does not matter to whoever comes next."""

    def moved(self) -> Mapping[str, float]:
        """Who is due at another time since this was last asked, because another was placed anew or left, and when."""


class Independent(ABC):
    """A policy under which it matters to nobody who else waits: one function."""

    virtual_s: float | None = None

    @abstractmethod
    def __call__(self, waiting: Waiting) -> float:
        """Seconds from its arrival until the request is due: finite, not negative, no more for fewer tokens. So nobody
        starves: whatever arrives after a request is due goes behind it."""

    def place(self, request_id: str, waiting: Waiting) -> float:
        """See `QueuePolicy.place`."""
        return waiting.arrived_s + self(waiting)

    def leave(self, request_id: str, *, admitted: bool) -> None:  # noqa: B027 - nothing to do is an answer
        """See `QueuePolicy.leave`."""

    def rest(self) -> None:  # noqa: B027 - as above
        """See `QueuePolicy.rest`."""

    def moved(self) -> Mapping[str, float]:
        """See `QueuePolicy.moved`."""
        return {}
