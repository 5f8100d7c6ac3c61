"""The requests that wait for admission, in the order that a policy gives them."""

from __future__ import annotations

from collections.abc import Iterator

from backend_service.request import Request
from backend_service.scheduling.base import QueuePolicy, Waiting


class WaitingLine:
    """Iterates in order of arrival; `in_order` gives the order of admission."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Join the line."""
        self._requests[request.id] = request

    def remove(self, request_id: str) -> bool:
        """Leave the line; False for who is not in it."""
        return self._requests.pop(request_id, None) is not None

    def in_order(self, now_s: float) -> list[Request]:
        """By rank, equals by arrival. O(n log n)."""
        return sorted(self, key=lambda request: self._policy(_facts(request, now_s)))


def _facts(request: Request, now_s: float) -> Waiting:
    return Waiting(
        waited_s=now_s - request.submitted_s,
        prefill_tokens=request.remaining_prefill_tokens,
        max_new_tokens=request.max_new_tokens,
        priority=request.priority,
    )
