"""The server interceptor that every call of ours goes through: bytes in, exceptions to statuses, bytes out."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError

from service_kit import errors
from service_kit.access import OWN, Access, is_observer, scope_of
from service_kit.calls import CallsInFlight
from service_kit.faults import Fault, InvalidRequest, Unavailable
from service_kit.identity import Caller, Scope, set_caller
from service_kit.telemetry import Telemetry

MAX_CAUSES = 8

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")
_Context = grpc.aio.ServicerContext[Any, Any]
_Handler = Any
"""A `grpc.RpcMethodHandler`, whose stub knows the types of synchronous servers only."""


class FaultInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call in or not, parses its request, opens the server span, counts it, and ends it with the status its
    exception stands for.

    Expects coroutine functions for unary answers and async generator functions for streams. Methods of other packages
    (health, reflection) pass through untouched once they may be called; Health.Watch, being a coroutine that writes,
    would not survive otherwise.
    """

    def __init__(self, calls: CallsInFlight, telemetry: Telemetry, access: Access) -> None:
        self._calls = calls
        self._telemetry = telemetry
        self._no_telemetry = Telemetry()
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handlers of our own services."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        own = method.startswith(OWN)
        try:
            caller = self._access.caller(method, handler_call_details.invocation_metadata or ())
            if own:
                self._calls.check(caller, observer=is_observer(method))
        except Fault as fault:
            return self._refusal(method, fault)
        if not own:
            return handler
        if handler.request_streaming:
            raise NotImplementedError(f"{method}: streams of requests are not in the contract")
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._stream(method, handler, caller))
        return grpc.unary_unary_rpc_method_handler(self._unary(method, handler, caller))

    def _refusal(self, method: str, fault: Fault) -> _Handler:
        """Ends the call whatever its kind. As a stream of requests, of which none is read: the message of somebody who
        is refused may be large."""
        span_name = method.removeprefix("/")
        telemetry = self._no_telemetry if is_observer(method) else self._telemetry

        async def refuse(_: object, context: _Context) -> None:
            with telemetry.server_span(span_name, context.invocation_metadata()) as span:
                status = errors.to_status(fault)
                span.code = errors.code_name(status)
                await errors.abort(context, status)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _unary(self, method: str, handler: _Handler, caller: Caller) -> Callable[[bytes, _Context], Awaitable[bytes]]:
        async def answer(raw: bytes, context: _Context) -> bytes:
            return _serialize(handler, await handler.unary_unary(_parse(handler, raw), context))

        async def call(raw: bytes, context: _Context) -> bytes:
            return await self._guard(method, caller, context, partial(answer, raw, context))

        return call

    def _stream(self, method: str, handler: _Handler, caller: Caller) -> Callable[[bytes, _Context], Awaitable[None]]:
        async def answer(raw: bytes, context: _Context) -> None:
            responses = handler.unary_stream(_parse(handler, raw), context)
            try:
                async for response in responses:
                    await context.write(_serialize(handler, response))
            finally:
                # Left to itself, a generator whose write failed is closed at some later time, outside of this call.
                await responses.aclose()

        async def call(raw: bytes, context: _Context) -> None:
            await self._guard(method, caller, context, partial(answer, raw, context))

        return call

    async def _guard(self, method: str, caller: Caller, context: _Context, answer: Callable[[], Awaitable[_T]]) -> _T:
        observer = is_observer(method)
        telemetry = self._no_telemetry if observer else self._telemetry
        with telemetry.server_span(method.removeprefix("/"), context.invocation_metadata()) as span:
            try:
                # Again: its message may have taken a while.
                self._calls.enter(context, caller, observer=observer)
                set_caller(caller)
                if scope_of(method) is Scope.ADMIN:
                    _log.info("admin call", method=method, client=caller.name, peer=context.peer())
                if observer:
                    return await answer()
                with self._calls.working():
                    return await answer()
            except Fault as fault:
                status = errors.to_status(fault)
            except grpc.aio.AioRpcError as error:
                status = errors.from_rpc_error(error).status
            except asyncio.CancelledError:
                if self._calls.was_given_up():
                    status = errors.to_status(
                        Unavailable("This server is shutting down and gave this request up; send it to another one.")
                    )
                elif _cancelled_by_client():
                    span.code = "DEADLINE_EXCEEDED" if context.time_remaining() == 0 else "CANCELLED"
                    raise
                else:
                    # Something cancelled a call or task of ours. gRPC would send no status: the client would hang.
                    status = errors.to_status(
                        Unavailable("The request was given up before it was done; send it again.")
                    )
            except grpc.aio.BaseError:
                # Aborted by the handler, or the client is gone: gRPC deals with both.
                span.code = (context.code() or grpc.StatusCode.CANCELLED).name
                raise
            except Exception as bug:  # noqa: BLE001
                # The last line of defence: whatever a bug raises, the client gets a status, and neither client nor log
                # gets its text, which may hold a part of a prompt.
                _log.error("call failed", method=method, **_place_of(bug))
                status = errors.internal_status("An internal error ended this request; the server's log has the cause.")
            span.code = errors.code_name(status)
            return await errors.abort(context, status)


def _place_of(bug: BaseException) -> dict[str, str]:
    """What an exception is and where it is from, without what it says."""
    kinds, error = [type(bug).__name__], bug
    while (cause := error.__cause__ or error.__context__) is not None and len(kinds) < MAX_CAUSES:
        kinds.append(type(cause).__name__)
        error = cause
    return {"error": " from ".join(kinds), "stack": "".join(traceback.format_tb(error.__traceback__)).rstrip()}


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
