"""Faults as gRPC statuses, and back: the one place that knows both.

Every status carries `google.rpc.ErrorInfo` (`reason` from the fault, domain "phaseroute") and, where it helps,
`BadRequest` or `RetryInfo`, in the trailer `grpc-status-details-bin`.
"""

from __future__ import annotations

from typing import Any, Never

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from service_kit.faults import (
    EngineFailed,
    Fault,
    Forbidden,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
    UnknownName,
)

DOMAIN = "phaseroute"
MAX_MESSAGE_BYTES = 512
"""Clients refuse trailers from 8 KiB on, at random at first. A message travels twice: percent-encoded, up to 3 bytes
for one, and in base64 among the details. 512 bytes leave more than half of the room."""
MAX_DETAILS_BYTES = 3072
"""A backend's details beyond this are dropped; code and message stay."""
MAX_RETRY_AFTER_S = 3600.0

_CODES: dict[type[Fault], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownName: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    EngineFailed: grpc.StatusCode.INTERNAL,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
}
_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class UpstreamFailed(Fault):
    """A backend's answer was an error; aborting with it passes on code, message and details."""

    reason = "UPSTREAM_FAILED"

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status
        self.code = _BY_NUMBER[status.code]
        """Never OK and never CANCELLED."""
        self.reason = _reason(status) or UpstreamFailed.reason
        """The backend's own `ErrorInfo.reason`, such as "OVERLOADED", where it sent one."""


def to_status(fault: Fault) -> status_pb2.Status:
    """What a client is told about a fault; long messages are cut to fit a trailer."""
    if isinstance(fault, UpstreamFailed):
        return fault.status
    code = next((_CODES[cls] for cls in type(fault).__mro__ if cls in _CODES), grpc.StatusCode.INTERNAL)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=fault.reason, domain=DOMAIN, metadata=fault.metadata)]
    if isinstance(fault, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shorten(fault.field), description=_shorten(fault.problem)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(fault, Overloaded):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(1000 * min(max(fault.retry_after_s, 0.0), MAX_RETRY_AFTER_S)))
        details.append(retry)
    return _status(code, str(fault), details)


def internal_status(message: str) -> status_pb2.Status:
    """INTERNAL for a bug of ours; the message must say nothing about the request."""
    return _status(grpc.StatusCode.INTERNAL, message, [error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN)])


def from_rpc_error(error: grpc.aio.AioRpcError) -> UpstreamFailed:
    """A backend's error as a fault that keeps what it said.

    CANCELLED becomes UNAVAILABLE: a client that did not cancel must not read that it did. A call that we cancelled
    ourselves raises `asyncio.CancelledError` and never comes here.
    """
    code = error.code()
    if code is grpc.StatusCode.CANCELLED:
        return UpstreamFailed(to_status(Unavailable("The backend gave up this request; send it again.")))
    status = _status(code, error.details() or f"The backend answered {code.name} without a message.", [])
    rich = _rich_status(error)
    if rich is not None and rich.ByteSize() <= MAX_DETAILS_BYTES:
        status.details.extend(rich.details)
    return UpstreamFailed(status)


async def abort(context: grpc.aio.ServicerContext[Any, Any], status: status_pb2.Status) -> Never:
    """End a call with a status, by raising `grpc.aio.AbortError`."""
    await context.abort_with_status(rpc_status.to_status(status))


def code_name(status: status_pb2.Status) -> str:
    """The status code's name, such as "NOT_FOUND"."""
    return _BY_NUMBER[status.code].name


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    try:
        return rpc_status.from_call(error)
    except (ValueError, DecodeError):
        # Details that contradict the call's own code or message, or are no Status at all, are not worth passing on.
        return None


def _reason(status: status_pb2.Status) -> str:
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return str(info.reason)
    return ""


def _status(code: grpc.StatusCode, message: str, details: list[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=_shorten(message))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _shorten(text: str) -> str:
    """At most MAX_MESSAGE_BYTES of valid UTF-8."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= MAX_MESSAGE_BYTES:
        return raw.decode()
    ellipsis = "…"
    return raw[: MAX_MESSAGE_BYTES - len(ellipsis.encode())].decode("utf-8", "ignore") + ellipsis
