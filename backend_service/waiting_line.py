"""The requests that wait for admission, in the order that a policy gives them."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from backend_service.request import Request, RequestView
from backend_service.scheduling.base import QueuePolicy, Waiting


class _Place(NamedTuple):
    """Compared by the first two fields, of which the second is unique."""

    due_s: float
    arrival: int
    request: Request
    view: RequestView


class WaitingLine:
    """Iterates in order of admission. Kept sorted, since a queue of thousands cannot be sorted, or shown, anew in
    every step."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._line: list[_Place] = []
        self._places: dict[str, _Place] = {}
        self._arrivals = itertools.count()
        self._views: tuple[RequestView, ...] | None = ()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        """In the order at the start of the iteration, whatever happens to the line meanwhile."""
        self._settle()
        return (place.request for place in tuple(self._line))

    def add(self, request: Request) -> None:
        """Join the line. O(log n) comparisons."""
        self._put(request, next(self._arrivals))

    def remove(self, request_id: str, *, admitted: bool = False) -> bool:
        """Leave the line, admitted or given up; False for who is not in it."""
        if request_id not in self._places:
            return False
        self._take(request_id)
        self._policy.leave(request_id, admitted=admitted)
        return True

    def renew(self, request: Request) -> None:
        """Place and show a request anew if by now less of its prompt is left to compute."""
        if self._places[request.id].view.remaining_prefill_tokens != request.remaining_prefill_tokens:
            self._put(request, self._take(request.id).arrival)

    @property
    def views(self) -> tuple[RequestView, ...]:
        """The line as Status shows it; the same object until the line changes."""
        self._settle()
        if self._views is None:
            self._views = tuple(place.view for place in self._line)
        return self._views

    def _put(self, request: Request, arrival: int) -> None:
        request.due_s = self._policy.place(
            request.id,
            Waiting(
                request.remaining_prefill_tokens,
                request.remaining_decode_tokens,
                request.priority,
                request.submitted_s,
                request.client,
                request.weight,
            ),
        )
        place = self._places[request.id] = _Place(request.due_s, arrival, request, request.view())
        insort(self._line, place)
        self._views = None

    def _take(self, request_id: str) -> _Place:
        place = self._places.pop(request_id)
        del self._line[bisect_left(self._line, place)]
        self._views = None
        return place

    def _settle(self) -> None:
        """Sort the line anew where somebody's leaving moved others; once for however many left, which may be all of a
        client's hundreds at once."""
        moved = self._policy.moved()
        if not moved:
            return
        for request_id, due_s in moved.items():
            old = self._places[request_id]
            old.request.due_s = due_s
            self._places[request_id] = _Place(due_s, old.arrival, old.request, old.request.view())
        self._line = sorted(self._places.values())
        self._views = None
