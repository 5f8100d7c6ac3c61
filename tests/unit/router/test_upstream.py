from __future__ import annotations

import asyncio

import grpc
import pytest

from phaseroute.v1 import inference_pb2 as pb
from router_service.upstream import messages
from service_kit.errors import UpstreamFailed

DELTA = pb.GenerateResponse(delta=pb.Delta(token_ids=[1]))


class Call:
    """A call upstream that sends these messages, then nothing until it is cancelled."""

    def __init__(self, *responses: pb.GenerateResponse | None) -> None:
        self._responses = responses
        self._reading: asyncio.Task | None = None
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        if self._reading is not None:
            self._reading.cancel()

    async def __aiter__(self):
        for response in self._responses:
            yield response
        # As gRPC does: whoever reads from a call that is cancelled here sees a cancel, though its own task was not.
        self._reading = asyncio.ensure_future(asyncio.Event().wait())
        await self._reading


async def never() -> str:
    await asyncio.Event().wait()
    return ""


async def gone() -> str:
    return "it makes no progress"


def read(call: Call, until_lost=never):
    return messages(lambda request, **_: call, pb.GenerateRequest(), until_lost, timeout_s=None, metadata=())


async def failure(responses) -> UpstreamFailed:
    with pytest.raises(UpstreamFailed) as caught:
        async for _ in responses:
            pass
    return caught.value


async def test_message_that_cannot_be_read_is_a_failure():
    """What gRPC makes of bytes that are no message: None."""
    call = Call(DELTA, None)
    failed = await failure(read(call))

    assert failed.code is grpc.StatusCode.INTERNAL
    assert "cannot be read" in str(failed)
    assert call.cancelled


async def test_lost_backend_ends_the_call_with_the_reason():
    call = Call(DELTA)
    failed = await failure(read(call, gone))

    assert (failed.code, str(failed)) == (grpc.StatusCode.UNAVAILABLE, "it makes no progress")
    assert call.cancelled


async def test_call_cancelled_by_somebody_else_is_a_failure():
    call = Call(DELTA)
    responses = read(call)
    await anext(responses)
    asyncio.get_running_loop().call_later(0.01, call.cancel)

    failed = await failure(responses)
    assert failed.code is grpc.StatusCode.UNAVAILABLE


async def test_closed_channel_is_a_failure():
    def closed(request, **_):
        raise grpc.aio.UsageError("Channel is closed.")

    failed = await failure(messages(closed, pb.GenerateRequest(), never, timeout_s=None, metadata=()))
    assert failed.code is grpc.StatusCode.UNAVAILABLE


async def test_own_cancel_stays_one_and_takes_call_and_watcher_along():
    watching = asyncio.Event()
    unwatched = asyncio.Event()

    async def until_lost() -> str:
        watching.set()
        try:
            return await never()
        finally:
            unwatched.set()

    call = Call()
    reader = asyncio.ensure_future(failure(read(call, until_lost)))
    await watching.wait()
    reader.cancel()

    with pytest.raises(asyncio.CancelledError):
        await reader
    await unwatched.wait()
    assert call.cancelled


async def test_giving_up_between_two_messages_cancels_the_call():
    call = Call(DELTA, DELTA)
    responses = read(call)
    await anext(responses)
    await responses.aclose()

    assert call.cancelled
