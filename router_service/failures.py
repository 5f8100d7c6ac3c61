"""Attempts that ended before their first token, and what the client is told when nobody is left."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from router_service.decision import Decision
from service_kit.errors import UpstreamFailed
from service_kit.faults import Fault, Overloaded, Unavailable

RETRYABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""Another backend may do better. With any other code it is the request, or the client's deadline."""
DEFAULT_RETRY_AFTER_S = 1.0
"""Told when no full backend said how long to wait."""


class Failures:
    """Of one request, by backend."""

    def __init__(self) -> None:
        self._failures: dict[str, UpstreamFailed] = {}

    def add(self, backend: str, failure: UpstreamFailed) -> None:
        """An attempt ended; its backend is not tried again."""
        self._failures[backend] = failure

    @property
    def reasons(self) -> dict[str, str]:
        """One line by backend."""
        return {name: f"{failure.code.name}: {failure}" for name, failure in self._failures.items()}

    def fault(self, last: Decision) -> Fault:
        """Why the request fails, now that the last decision found nobody."""
        if last.choice.retry_after_s is not None:
            return Overloaded(f"{last.choice.reason}.", last.choice.retry_after_s)
        failures = list(self._failures.values())
        if failures and all(failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED for failure in failures):
            waits_s = [wait_s for failure in failures if (wait_s := _retry_after_s(failure)) is not None]
            return Overloaded(f"{last.choice.reason}.", min(waits_s, default=DEFAULT_RETRY_AFTER_S))
        if len(failures) == 1 and failures[0].code is not grpc.StatusCode.UNAVAILABLE:
            return failures[0]
        return Unavailable(f"{last.choice.reason}; try again later.")


def _retry_after_s(failure: UpstreamFailed) -> float | None:
    for detail in failure.status.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            return float(retry.retry_delay.ToNanoseconds()) / 1e9
    return None
