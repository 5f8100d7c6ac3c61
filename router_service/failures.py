"""One request's failed attempts, and what the client is told when nobody is left and it has nothing yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import shorten

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from router_service.decision import Decision
from service_kit.errors import UpstreamFailed
from service_kit.faults import Fault, Overloaded, Unavailable

DEFAULT_RETRY_AFTER_S = 1.0
"""Told when no full backend said how long to wait."""
REST_S = 0.5
"""A backend that broke an answer is left alone by it for so long at first."""
FAILURE_ROOM = 140
"""Characters of a backend's own words in a sentence of ours: a status message holds 512 bytes, and what to do comes
last."""


@dataclass(frozen=True, slots=True)
class Failed:
    """How one attempt ended."""

    backend: str
    incarnation: str
    """Of the backend's process, when the attempt was booked."""
    failure: UpstreamFailed
    at_s: float
    """On the router's clock."""


class Failures:
    """Of one request, oldest first."""

    def __init__(self) -> None:
        self._failed: list[Failed] = []

    def add(self, backend: str, incarnation: str, failure: UpstreamFailed, now_s: float) -> None:
        """An attempt ended; this process of the backend is not tried again, or not for a while."""
        self._failed.append(Failed(backend, incarnation, failure, now_s))

    def reasons(self, incarnations: Mapping[str, str], now_s: float | None = None) -> dict[str, str]:
        """One line by backend, for those whose process is still the one that failed: one that was started since may
        be asked again. `incarnations`: of the processes there are now, by backend.

        With `now_s`, for an answer that has begun and cannot start over, the same process may be asked again, too,
        after `REST_S`, doubled with each failure there: a network that was cut comes back without a new process.
        """
        reasons: dict[str, str] = {}
        rest_s: dict[str, float] = {}
        for failed in self._failed:
            name = failed.backend
            if incarnations.get(name, failed.incarnation) != failed.incarnation:
                continue
            rest_s[name] = 2 * rest_s[name] if name in rest_s else REST_S
            if now_s is None or now_s < failed.at_s + rest_s[name]:
                reasons[name] = f"{failed.failure.code.name}: {failed.failure}"
        return reasons

    @property
    def attempts(self) -> int:
        """How many there were."""
        return len(self._failed)

    @property
    def broken(self) -> int:
        """How many of them failed otherwise than for want of room."""
        return sum(failed.failure.code is not grpc.StatusCode.RESOURCE_EXHAUSTED for failed in self._failed)

    @property
    def last(self) -> tuple[str, UpstreamFailed]:
        """The backend that failed last, and how."""
        return self._failed[-1].backend, self._failed[-1].failure

    def metadata(self, generated_tokens: int) -> dict[str, str]:
        """What a fault tells machines, where there were failures: the request as far as it came."""
        if not self._failed:
            return {}
        return {
            "generated_tokens": str(generated_tokens),
            "attempts": str(self.attempts),
            "backend": self._failed[-1].backend,
        }

    def nobody_left(self, last: Decision) -> Fault:
        """Why the request fails before its first token, now that the last decision found nobody."""
        if last.choice.retry_after_s is not None:
            return Overloaded(f"{last.choice.reason}.", last.choice.retry_after_s)
        failures = [failed.failure for failed in self._failed]
        if failures and all(failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED for failure in failures):
            waits_s = [wait_s for failure in failures if (wait_s := _retry_after_s(failure)) is not None]
            return Overloaded(f"{last.choice.reason}.", min(waits_s, default=DEFAULT_RETRY_AFTER_S))
        return self._own(f"{last.choice.reason}; try again later.")

    def given_up(self) -> Fault:
        """Why the request fails before its first token, now that enough attempts did."""
        backend, failure = self.last
        problem = shorten(str(failure), FAILURE_ROOM, placeholder="…")
        return self._own(f"{self.broken} attempts failed, the last on backend {backend} ({problem}); try again later.")

    def _own(self, problem: str) -> Fault:
        """Said in our words, unless the only backend that was asked has better ones."""
        if len(self._failed) == 1 and self._failed[0].failure.code is not grpc.StatusCode.UNAVAILABLE:
            return self._failed[0].failure
        fault = Unavailable(problem)
        fault.metadata = self.metadata(generated_tokens=0)
        return fault


def _retry_after_s(failure: UpstreamFailed) -> float | None:
    for detail in failure.status.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            return float(retry.retry_delay.ToNanoseconds()) / 1e9
    return None
