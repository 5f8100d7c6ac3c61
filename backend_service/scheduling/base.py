"""The plug for the order of admission: one function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service_kit.requests import Priority


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a policy may know of a waiting request."""

    prefill_tokens: int
    """To be computed before its first token, as far as is known."""
    max_new_tokens: int
    priority: Priority


class QueuePolicy(Protocol):
    """Says when a waiting request is due. The earliest due is admitted first; equals go in order of arrival.

    A due time never moves back, so nobody starves under any policy: whatever arrives after a request is due goes
    behind it.
    """

    name: str
    promote_batch_after_s: float
    """A batch request counts as an interactive one that came so much later; 0: priorities do not count."""

    def __call__(self, waiting: Waiting) -> float:
        """Seconds from its arrival until the request is due: finite, not negative, no more for fewer tokens."""
