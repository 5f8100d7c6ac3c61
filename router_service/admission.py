"""How much a router takes in at a time, of all clients and of each.

Nothing waits here: what is taken in is sent to a backend at once, and what is not is refused at once. So these counts
bound all that a router holds; queues, and fairness between clients in them, are the backends'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from service_kit.faults import Overloaded
from service_kit.identity import Caller

LEAST_RETRY_S = 0.1
RETRY_S = 1.0
"""Told while no finish is predicted."""
LOOK_AGAIN_S = 0.05
"""A forecast is asked for so often at most: refusing must stay cheap when it is needed most."""

Forecast = Callable[[str | None, float], float | None]
"""When something is predicted to be done, of one client's requests or (None) of all, and after the moment given; None
where nothing is predicted."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Of all clients together."""

    max_in_flight: int = 4096
    max_in_flight_tokens: int = 0
    """Prompts and decode budgets; 0: no bound. A request that is alone is taken whatever its size."""


@dataclass(slots=True)
class Ticket:
    """One request in flight."""

    tokens: int
    """What it was counted for."""
    used_tokens: int
    """What it has come to by its end: the rest is given back to the client's allowance."""


@dataclass(slots=True)
class _Client:
    in_flight: int
    allowance_tokens: float
    """As of `counted_s`; below 0 after a request that is larger than a minute's worth."""
    counted_s: float

    def refill(self, per_minute: int, now_s: float) -> float:
        """The allowance now: it grows up to a minute's worth."""
        gained = (now_s - self.counted_s) * per_minute / 60
        self.allowance_tokens, self.counted_s = min(self.allowance_tokens + gained, per_minute), now_s
        return self.allowance_tokens


class Admission:
    """Counts what is in flight. Times are those of `clock`, which is the forecast's too."""

    def __init__(
        self, limits: AdmissionLimits, *, finish_s: Forecast, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._finish_s = finish_s
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        """Those that have something in flight, or have used some of their allowance."""
        self._forecasts: dict[str | None, tuple[float, float]] = {}
        """(asked at, retry after) by client; only those with limits, of whom there are few."""
        self.requests = 0
        self.tokens = 0

    def counts_tokens(self, caller: Caller) -> bool:
        """Whether it makes a difference how large a request of this caller is."""
        return bool(self._limits.max_in_flight_tokens) or caller.tokens_per_minute is not None

    @contextmanager
    def admit(self, caller: Caller, tokens: int) -> Iterator[Ticket]:
        """Count a request while the block lasts. `tokens`: its prompt, as far as is known, and its budget. Raises
        `Overloaded` where it is over a bound; then nothing is counted."""
        now_s = self._clock()
        per_minute = caller.tokens_per_minute
        client = self._clients.get(caller.name) or _Client(0, per_minute or 0, now_s)
        self._check_all(tokens, now_s)
        self._check_client(caller, client, tokens, now_s)
        self._clients[caller.name] = client
        client.in_flight += 1
        if per_minute is not None:
            client.allowance_tokens -= tokens
        self.requests += 1
        self.tokens += tokens
        ticket = Ticket(tokens, tokens)
        try:
            yield ticket
        finally:
            self.requests -= 1
            self.tokens -= tokens
            client.in_flight -= 1
            full = per_minute is None
            if per_minute is not None:
                client.allowance_tokens += max(0, tokens - ticket.used_tokens)
                full = client.refill(per_minute, self._clock()) >= per_minute
            if full and not client.in_flight:
                del self._clients[caller.name]

    def _check_all(self, tokens: int, now_s: float) -> None:
        limits = self._limits
        if self.requests >= limits.max_in_flight:
            raise Overloaded(
                f"This router has {self.requests} requests in flight, and takes no more; try again later, or raise its "
                "--max-in-flight.",
                self._retry_after_s(None, now_s),
            )
        most = limits.max_in_flight_tokens
        if most and self.requests and self.tokens + tokens > most:
            raise Overloaded(
                f"This router has {self.tokens} tokens in flight, and with {tokens} more it would be over {most}; try "
                "again later, or raise its --max-in-flight-tokens.",
                self._retry_after_s(None, now_s),
            )

    def _check_client(self, caller: Caller, client: _Client, tokens: int, now_s: float) -> None:
        if caller.max_in_flight is not None and client.in_flight >= caller.max_in_flight:
            raise Overloaded(
                f"Client {caller.name} has {client.in_flight} requests in flight, as many as it may; wait for one of "
                "them to end.",
                self._retry_after_s(caller.name, now_s),
            )
        per_minute = caller.tokens_per_minute
        if per_minute is None:
            return
        # What is larger than a minute's worth has to wait for all of it, and the next ones pay for the rest.
        missing = min(tokens, per_minute) - client.refill(per_minute, now_s)
        if missing > 0:
            raise Overloaded(
                f"Client {caller.name} has used its {per_minute} tokens a minute, and this request has {tokens}; try "
                "again later, or ask for fewer.",
                max(LEAST_RETRY_S, 60 * missing / per_minute),
            )

    def _retry_after_s(self, client: str | None, now_s: float) -> float:
        """Until something is predicted to be done."""
        asked_s, told_s = self._forecasts.get(client, (-LOOK_AGAIN_S, 0.0))
        if now_s - asked_s < LOOK_AGAIN_S:
            return told_s
        finish_s = self._finish_s(client, now_s)
        if finish_s is None and client is not None:
            finish_s = self._finish_s(None, now_s)
        told_s = RETRY_S if finish_s is None else max(LEAST_RETRY_S, finish_s - now_s)
        self._forecasts[client] = (now_s, told_s)
        return told_s
