"""The one exception of both clients, made from a gRPC error and its google.rpc details."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

_DETAILS_KEY = "grpc-status-details-bin"


class PhaserouteError(Exception):
    """A call that failed. `str(error)` is the server's sentence: what was wrong, and what to do next."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        """Path of the request field that was refused, such as `sampling.top_p`."""
        self.reason = reason
        """A constant for programs, such as `OVERLOADED`. None when no phaseroute service answered: then the connection
        itself failed, or something between here and there."""
        self.retry_after_s = retry_after_s
        """When the server expects to have room again."""


def from_rpc_error(error: grpc.RpcError, target: str) -> PhaserouteError:
    """Translate what grpc or grpc.aio raised; both kinds carry code, details and trailing metadata."""
    code, message = error.code(), error.details() or ""
    field = reason = retry_after_s = None
    for detail in _details(error):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            reason = _unpack(detail, error_details_pb2.ErrorInfo()).reason
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            violations = _unpack(detail, error_details_pb2.BadRequest()).field_violations
            field = violations[0].field if violations else None
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            delay = _unpack(detail, error_details_pb2.RetryInfo()).retry_delay
            retry_after_s = delay.seconds + delay.nanos / 1e9
    if code is grpc.StatusCode.CANCELLED and reason is None and not message.startswith("Locally cancelled"):
        # How gRPC ends calls that reach a server while it stops: nobody cancelled them.
        code, message = grpc.StatusCode.UNAVAILABLE, "it stopped as the call reached it"
    if reason is None:
        message = _explain(code, message, target)
    return PhaserouteError(code, message, field=field, reason=reason, retry_after_s=retry_after_s)


def _details(error: grpc.RpcError) -> list[Any]:
    trailer: Iterable[Any] = error.trailing_metadata() or ()
    for key, value in trailer:
        if key == _DETAILS_KEY:
            return list(status_pb2.Status.FromString(value).details)
    return []


def _unpack(detail: Any, message: Any) -> Any:
    detail.Unpack(message)
    return message


def _explain(code: grpc.StatusCode, message: str, target: str) -> str:
    """Say in words of this project what gRPC itself reported."""
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return (
                f"No connection to {target}, or it broke ({message}). Check the address and that a server runs there."
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"{target} did not finish within the time limit. Allow more time, or ask for fewer tokens."
        case grpc.StatusCode.UNIMPLEMENTED:
            return f"{target} does not offer this call ({message}). A single backend has no router calls: ask a router."
        case _:
            return message or f"{target} answered {code.name} and said no more. Its log says why."
