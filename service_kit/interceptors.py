"""The server interceptor that every call of ours goes through: bytes in, exceptions to statuses, bytes out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError

from service_kit import errors
from service_kit.faults import Fault, InvalidRequest, Unavailable
from service_kit.telemetry import Telemetry

PREFIX = "/phaseroute."
"""Methods of other packages (health, reflection) pass through untouched; Health.Watch, being a coroutine that
writes, would not survive otherwise."""

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")
_Context = grpc.aio.ServicerContext[Any, Any]
_Handler = Any
"""A `grpc.RpcMethodHandler`, whose stub knows the types of synchronous servers only."""


def is_observer(method: str) -> bool:
    """Whether a method only looks on: no trace is made of it, and it goes on during a drain without prolonging it."""
    name = method.rpartition("/")[2]
    return name in ("Status", "ListBackends") or name.startswith("Watch")


class CallsInFlight:
    """Counts the calls that a drain waits for, and turns new ones away once it has begun."""

    def __init__(self) -> None:
        self.count = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, context: _Context) -> None:
        """Count a call until its status is sent. Raises `Unavailable` during a drain."""
        if self.draining:
            raise Unavailable("This server is shutting down; send the request to another one.")
        self.count += 1
        self._idle.clear()
        # Called when the status is on its way; when our handler returns, it is not yet.
        context.add_done_callback(self._leave)  # type: ignore[arg-type]  # the stub wants a class here, not a function

    async def wait_idle(self) -> None:
        """Return once no call is left."""
        await self._idle.wait()

    def _leave(self, ctx: _Context) -> None:
        self.count -= 1
        if self.count == 0:
            self._idle.set()


class FaultInterceptor(grpc.aio.ServerInterceptor):
    """Parses requests, opens the server span, counts the call, and ends it with the status its exception stands for.

    Expects coroutine functions for unary answers and async generator functions for streams.
    """

    def __init__(self, calls: CallsInFlight, telemetry: Telemetry) -> None:
        self._calls = calls
        self._telemetry = telemetry
        self._no_telemetry = Telemetry()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handlers of our own services."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(PREFIX):
            return handler
        if handler.request_streaming:
            raise NotImplementedError(f"{method}: streams of requests are not in the contract")
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._stream(method, handler))
        return grpc.unary_unary_rpc_method_handler(self._unary(method, handler))

    def _unary(self, method: str, handler: _Handler) -> Callable[[bytes, _Context], Awaitable[bytes]]:
        async def answer(raw: bytes, context: _Context) -> bytes:
            return _serialize(handler, await handler.unary_unary(_parse(handler, raw), context))

        async def call(raw: bytes, context: _Context) -> bytes:
            return await self._guard(method, context, partial(answer, raw, context))

        return call

    def _stream(self, method: str, handler: _Handler) -> Callable[[bytes, _Context], Awaitable[None]]:
        async def answer(raw: bytes, context: _Context) -> None:
            responses = handler.unary_stream(_parse(handler, raw), context)
            try:
                async for response in responses:
                    await context.write(_serialize(handler, response))
            finally:
                # Left to itself, a generator whose write failed is closed at some later time, outside of this call.
                await responses.aclose()

        async def call(raw: bytes, context: _Context) -> None:
            await self._guard(method, context, partial(answer, raw, context))

        return call

    async def _guard(self, method: str, context: _Context, answer: Callable[[], Awaitable[_T]]) -> _T:
        observer = is_observer(method)
        telemetry = self._no_telemetry if observer else self._telemetry
        with telemetry.server_span(method.removeprefix("/"), context.invocation_metadata()) as span:
            try:
                if not observer:
                    self._calls.enter(context)
                return await answer()
            except Fault as fault:
                status = errors.to_status(fault)
            except grpc.aio.AioRpcError as error:
                status = errors.from_rpc_error(error).status
            except asyncio.CancelledError:
                if _cancelled_by_client():
                    span.code = "DEADLINE_EXCEEDED" if context.time_remaining() == 0 else "CANCELLED"
                    raise
                # Something cancelled a call or task of ours. gRPC would send no status at all: the client would hang.
                status = errors.to_status(Unavailable("The request was given up before it was done; send it again."))
            except grpc.aio.BaseError:
                # Aborted by the handler, or the client is gone: gRPC deals with both.
                span.code = (context.code() or grpc.StatusCode.CANCELLED).name
                raise
            except Exception:  # noqa: BLE001
                # The last line of defence: whatever a bug raises, the client gets a status, and nothing of its text.
                _log.exception("call failed", method=method)
                status = errors.internal_status("An internal error ended this request; the server's log has the cause.")
            span.code = errors.code_name(status)
            return await errors.abort(context, status)


def _parse(handler: _Handler, raw: bytes) -> Any:
    try:
        return handler.request_deserializer(raw)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            "request",
            f"the bytes are no valid message ({error}); encode strings as UTF-8 and the message by phaseroute's .proto "
            "files",
        ) from error


def _serialize(handler: _Handler, response: Any) -> bytes:
    raw: bytes = handler.response_serializer(response)
    return raw


def _cancelled_by_client() -> bool:
    """gRPC cancels the call's task when the client goes away or its deadline passes; nobody else may."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
