"""The places before and in the batch: who holds them, and who gives way when there are none left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

QUEUED_CONTEXTS = 64


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait."""

    max_active: int
    """Largest batch."""
    max_queued: int
    """Requests."""
    max_queued_tokens: int | None = 0
    """Their prompts and decode budgets. 0: no such bound; None: `QUEUED_CONTEXTS` times the engine's context. It is not
    for requests that find a place in the batch free, and one request may always wait: else a long one would never be
    taken."""

    def known(self, context_tokens: int) -> QueueLimits:
        """With the default that depends on the engine."""
        if self.max_queued_tokens is not None:
            return self
        return replace(self, max_queued_tokens=QUEUED_CONTEXTS * context_tokens)


@dataclass(frozen=True, slots=True)
class Place:
    """One request here."""

    client: str
    weight: float
    tokens: int
    """Prompt and new tokens."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What is over the bounds with one more request; nothing where that is all 0."""

    requests: int = 0
    tokens: int = 0

    def __bool__(self) -> bool:
        return self.requests > 0 or self.tokens > 0


class Places:
    """Books of the requests that were taken and are not over. O(batch) while there is room.

    A client may take all that nobody else asks for. Where all is taken, the client that holds most by weight (requests
    or tokens, whichever is short) gives up its newest waiting request for one of another client, as long as the one
    does not fall below the other by that; who would hold most itself is refused. So the shares of clients that keep
    asking become equal, and with one client it is a plain bound.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._held: dict[str, Place] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._held)

    def take(self, request_id: str, place: Place) -> None:
        """Book a request, under an id that is not here."""
        self._held[request_id] = place
        self._tokens += place.tokens

    def leave(self, request_id: str) -> None:
        """It is over; unknown ids are ignored."""
        if place := self._held.pop(request_id, None):
            self._tokens -= place.tokens

    def shortage(self, place: Place, active: Collection[str], *, batch: int) -> Shortage:
        """What is missing for one more. `active`: ids of those that are in the batch, `batch`: its size now."""
        running = [self._held[request_id] for request_id in active if request_id in self._held]
        limits = self._limits
        requests = max(0, len(self._held) + 1 - limits.max_active - limits.max_queued)
        waiting = len(self._held) - len(running)
        if not limits.max_queued_tokens or waiting < max(1, batch - len(running)):
            return Shortage(requests)
        tokens = self._tokens - sum(held.tokens for held in running) + place.tokens
        return Shortage(requests, max(0, tokens - limits.max_queued_tokens))

    def giving_way(self, place: Place, active: Collection[str], shortage: Shortage) -> tuple[str, ...]:
        """The ids of waiting requests that give way to this one; none where it is to be refused. O(requests)."""
        queues: dict[str, list[str]] = defaultdict(list)
        for request_id, held in self._held.items():
            if request_id not in active:
                queues[held.client].append(request_id)
        losers: list[str] = []
        requests, tokens = shortage.requests, shortage.tokens
        while requests > 0 or tokens > 0:
            size: Callable[[Place], int] = _one if requests > 0 else _tokens
            holds = {
                client: sum(size(self._held[name]) for name in names) / self._held[names[-1]].weight
                for client, names in queues.items()
                if names
            }
            greediest = max(holds, key=holds.__getitem__, default=place.client)
            if greediest == place.client:
                return ()
            losers.append(queues[greediest].pop())
            loser = self._held[losers[-1]]
            left = holds[greediest] - size(loser) / loser.weight
            if left < holds.get(place.client, 0.0) + size(place) / place.weight:
                return ()
            requests -= 1
            tokens -= loser.tokens
        return tuple(losers)


def _one(place: Place) -> int:
    return 1


def _tokens(place: Place) -> int:
    return place.tokens
