"""The plug for the order of admission: one function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service_kit.requests import Priority


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a policy may know of a waiting request."""

    waited_s: float
    prefill_tokens: int
    """To be computed before its first token, as far as is known."""
    max_new_tokens: int
    priority: Priority


class QueuePolicy(Protocol):
    """Ranks waiting requests. The lowest rank is admitted first; equals go in order of arrival.

    Ranks are compared within one pass only, so they may change as time goes by. To starve nobody, a request's rank
    must in the end fall below that of anything which arrives later.
    """

    name: str

    def __call__(self, waiting: Waiting) -> float:
        """The rank of a request."""
