"""Clients share a backend by weight, whatever each of them sends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from backend_service.scheduling.base import Waiting


class Fair:
    """Start-time fair queueing (Goyal, Vin, Cheng 1996): a request is due when, in virtual time, its client has been
    served what it asked for before; at once where that is long ago. So a client waits as if all others together sent no
    more than their shares, and among its own requests it is first come, first served.

    A request costs the seconds that it would take alone, divided by its client's weight. Virtual time is the due time
    of the last admitted request, but at least what the clients that wait would have got so far in equal shares: without
    this bound (from WF2Q+, Bennett and Zhang 1997) it would stand still while ever new clients come, and nobody else
    would get through.

    What is given up while it waits costs nothing: else a client whose requests time out in the line would wait ever
    longer. A client that has nothing waiting is forgotten once virtual time has passed all that was admitted of it.
    """

    name = "fair"
    promote_batch_after_s = 0.0

    def __init__(self, prefill_tokens_per_s: float, decode_tokens_per_s: float) -> None:
        """The engine's rates for one request alone. Raises `ValueError` unless they are above 0."""
        for rate in (prefill_tokens_per_s, decode_tokens_per_s):
            if not rate > 0:
                raise ValueError(f"{rate} tokens/s is no rate; measure the engine first")
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._decode_tokens_per_s = decode_tokens_per_s
        self._now_s = 0.0
        self._share_s = 0.0
        """What the last admission brought each client: virtual time gains as much by the next one."""
        self._clients: dict[str, _Client] = {}
        self._of: dict[str, _Client] = {}
        """By request."""

    @property
    def virtual_s(self) -> float | None:
        """See `QueuePolicy.virtual_s`."""
        return self._now_s

    def place(self, request_id: str, waiting: Waiting) -> float:
        """See `QueuePolicy.place`."""
        cost_s = (
            waiting.prefill_tokens / self._prefill_tokens_per_s + waiting.max_new_tokens / self._decode_tokens_per_s
        ) / waiting.weight
        client = self._of.get(request_id)
        if client is not None:  # only those behind it gain
            client.costs_s[request_id] = cost_s
            client.stale = True
            return client.due_s(request_id)
        client = self._of[request_id] = self._clients.setdefault(waiting.client, _Client(waiting.client))
        if not client.costs_s:
            client.start_s = client.end_s = max(self._now_s, client.start_s)
        elif client.stale:
            client.dues_s()
        due_s = client.end_s
        client.weight = waiting.weight
        client.costs_s[request_id] = cost_s
        client.end_s += cost_s
        return due_s

    def leave(self, request_id: str, *, admitted: bool) -> None:
        """See `QueuePolicy.leave`."""
        client = self._of.pop(request_id)
        first = next(iter(client.costs_s)) == request_id
        due_s = client.due_s(request_id) if admitted else 0.0
        cost_s = client.costs_s.pop(request_id)
        client.stale |= not (admitted and first)
        if admitted:  # one that went ahead of others of its client is paid before them all the same
            client.start_s += cost_s
            self._advance(client, due_s, cost_s * client.weight)
        elif not client.costs_s and client.start_s <= self._now_s:
            del self._clients[client.name]

    def moved(self) -> Mapping[str, float]:
        """See `QueuePolicy.moved`."""
        moved: dict[str, float] = {}
        for client in self._clients.values():
            if client.stale:
                moved |= client.dues_s()
                client.stale = False
        return moved

    def rest(self) -> None:
        """See `QueuePolicy.rest`."""
        self._clients.clear()

    def _advance(self, client: _Client, due_s: float, cost_s: float) -> None:
        """Virtual time at the admission of a request of this client."""
        self._now_s = max(self._now_s + self._share_s, due_s)
        others = sum(other.weight for other in self._clients.values() if other.costs_s and other is not client)
        self._share_s = cost_s / (client.weight + others)
        for other in tuple(self._clients.values()):
            if not other.costs_s and other.start_s <= self._now_s:
                del self._clients[other.name]


@dataclass(slots=True)
class _Client:
    name: str
    weight: float = 1.0
    start_s: float = 0.0
    """When the first of its waiting requests is due: what was admitted of it is paid by then."""
    end_s: float = 0.0
    """When one that arrives now is due; wrong while `stale`."""
    costs_s: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Of its waiting requests, in order of arrival."""
    stale: bool = False
    """Its requests are due at other times than they were told."""

    def due_s(self, request_id: str) -> float:
        """When one of its waiting requests is due."""
        at_s = self.start_s
        for other, cost_s in self.costs_s.items():
            if other == request_id:
                break
            at_s += cost_s
        return at_s

    def dues_s(self) -> dict[str, float]:
        """When each of them is due, and the next one."""
        due_s, at_s = {}, self.start_s
        for request_id, cost_s in self.costs_s.items():
            due_s[request_id] = at_s
            at_s += cost_s
        self.end_s = at_s
        return due_s
