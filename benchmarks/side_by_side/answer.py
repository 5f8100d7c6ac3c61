"""What came back from a server, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """A server's own count of an answer."""

    prompt_tokens: int
    cached_tokens: int
    """The part of the prompt that was not computed again."""
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of an answer's stream."""

    token_ids: tuple[int, ...] = ()
    usage: Usage | None = None
    """In the last message."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. Seconds on the client's clock."""

    sent_s: float
    arrivals_s: tuple[float, ...]
    """One for each token."""
    ended_s: float
    usage: Usage
    first_token: int

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals_s[0] - self.sent_s


@dataclass(frozen=True, slots=True)
class Played:
    """A workload's outcome on one server."""

    measured: tuple[Answer, ...]
    beside_arrivals_s: tuple[tuple[float, ...], ...] = ()
    """Of the streams that decoded meanwhile and were cancelled: when each of their tokens came."""
