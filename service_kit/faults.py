"""The ways a request can fail, as exceptions that know nothing of gRPC.

Every message is one or two sentences: what was wrong, and what to do next. `service_kit.errors` maps each class to its
status code; nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping


class Fault(Exception):
    """Base of everything a caller is told. `str(fault)` is the message they read."""

    reason = "FAULT"
    """Machine-readable constant, sent as `google.rpc.ErrorInfo.reason`."""
    metadata: Mapping[str, str] = {}
    """More for machines, sent as `google.rpc.ErrorInfo.metadata`: a few short values, nothing of a prompt or answer."""


class InvalidRequest(Fault):
    """The request can never work as it is (INVALID_ARGUMENT)."""

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        """Path of the offending field in the request, such as `sampling.top_p`."""
        self.problem = problem


class UnknownName(Fault):
    """A model or backend that is not here (NOT_FOUND)."""

    reason = "UNKNOWN_NAME"


class Overloaded(Fault):
    """No room now (RESOURCE_EXHAUSTED with RetryInfo)."""

    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(Fault):
    """Nobody can serve this now, but the same call may work later (UNAVAILABLE)."""

    reason = "UNAVAILABLE"


class Unauthenticated(Fault):
    """Nobody knows who is calling (UNAUTHENTICATED)."""

    reason = "UNAUTHENTICATED"


class Forbidden(Fault):
    """The caller is known and may not do this (PERMISSION_DENIED)."""

    reason = "FORBIDDEN"


class EngineFailed(Fault):
    """The engine broke while it computed this request (INTERNAL)."""

    reason = "ENGINE_FAILED"


class StartupFailed(Fault):
    """The process cannot start as configured; the message goes to the terminal."""

    reason = "STARTUP_FAILED"
    exit_code = 2


class LoadFailed(StartupFailed):
    """What it was told is in order, but the model could not be loaded: a file, a package or memory is missing."""

    exit_code = 1
