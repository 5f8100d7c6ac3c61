"""From a client through the router to scripted backends: streaming, failover, cancel."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from phaseroute.v1 import inference_pb2 as pb
from router_service.relay import Client
from tests.integration.stub_backend import SLOW, StubBackend, answers, delta, fails, hangs, last, request, router


def tokens(responses) -> list[int]:
    return [token_id for response in responses for token_id in response.delta.token_ids]


async def failure_or_end(call) -> grpc.aio.AioRpcError | None:
    """The error that a stream ends with, None when it ends well."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def failure(call) -> grpc.aio.AioRpcError:
    """The error that a stream ends with."""
    error = await failure_or_end(call)
    assert error is not None
    return error


async def unused_target() -> str:
    """An address where nobody listens."""
    async with StubBackend().serving() as stub:
        return stub.target


async def test_stream_is_passed_on_with_a_routing_record():
    async with router({"gpu": StubBackend()}) as routed:
        responses = await routed.generate()

        assert tokens(responses) == [1, 2, 3]
        record = responses[-1].finished.routing
        assert (record.backend, record.policy, record.attempts) == ("gpu", "predictive", 1)
        assert record.predicted_finish_s >= record.predicted_ttft_s > 0
        assert record.actual_finish_s >= record.actual_ttft_s > 0
        assert responses[-1].finished.usage.generated_tokens == 3
        assert len(routed.router.ledger) == 0


async def test_what_is_forwarded():
    stub = StubBackend()
    stub.probe = stub.tells(100, 60)
    async with router({"gpu": stub}) as routed:
        sent = pb.GenerateRequest(
            prompt=pb.Prompt(text="hello"),
            workload="chat",
            stop=["."],
            priority=pb.PRIORITY_BATCH,
            routing=pb.RoutingHints(policy="least_loaded", excluded_backends=["other"]),
            attempt=pb.Attempt(id="of the client", reusable_tokens=5),
        )
        await routed.inference.Generate(sent, metadata=(("x-request-id", "r-17"), ("secret", "s"))).read()
        await stub.wait(lambda stub: stub.running == 0)

        (forwarded,) = stub.requests
        assert forwarded.max_new_tokens == 256
        assert (forwarded.workload, list(forwarded.stop)) == ("chat", ["."])
        assert forwarded.priority == pb.PRIORITY_BATCH
        assert not forwarded.HasField("routing")
        assert forwarded.attempt.id not in ("", "of the client")
        assert forwarded.attempt.reusable_tokens == 60
        assert stub.metadata[0]["x-request-id"] == "r-17"
        assert "secret" not in stub.metadata[0]


async def test_deadline_is_forwarded():
    stub = StubBackend()
    async with router({"gpu": stub}) as routed:
        await routed.generate()
        await routed.inference.Generate(request(), timeout=60).read()

        without, with_deadline = stub.time_left_s
        assert without is None
        assert 30 < with_deadline < 61  # the wire rounds up


async def test_clients_deadline_ends_the_call_upstream():
    stub = StubBackend()
    stub.generate = hangs()
    async with router({"gpu": stub}) as routed:
        error = await failure(routed.inference.Generate(request(), timeout=0.3))

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stub.wait(lambda stub: stub.hanging == 1 and stub.running == 0)
        await routed.wait(lambda router: len(router.ledger) == 0)


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
    ],
)
async def test_failure_before_the_first_token_goes_elsewhere(code):
    first, second = StubBackend(), StubBackend(SLOW)
    first.generate = fails(code)
    async with router({"first": first, "second": second}) as routed:
        responses = await routed.generate()

        assert tokens(responses) == [1, 2, 3]
        record = responses[-1].finished.routing
        assert (record.backend, record.attempts) == ("second", 2)
        assert len(first.requests) == len(second.requests) == 1
        assert first.requests[0].attempt.id != second.requests[0].attempt.id
        assert len(routed.router.ledger) == 0


async def test_backend_that_refuses_connections_is_passed_over():
    first, second = StubBackend(), StubBackend(SLOW)
    async with first.serving(), router({"first": first, "second": second}) as routed:
        # Its Status is there, its server is not.
        routed.router.fleet.backends["first"].stub = type(routed.inference)(
            grpc.aio.insecure_channel(await unused_target())
        )
        responses = await routed.generate()

        assert responses[-1].finished.routing.backend == "second"
        assert len(routed.router.ledger) == 0


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION])
async def test_what_is_the_requests_own_fault_is_passed_on(code):
    first, second = StubBackend(), StubBackend(SLOW)
    first.generate = fails(code, "sampling.top_p: no")
    async with router({"first": first, "second": second}) as routed:
        error = await failure(routed.inference.Generate(request()))

        assert (error.code(), error.details()) == (code, "sampling.top_p: no")
        assert second.requests == []
        assert len(routed.router.ledger) == 0


async def test_every_backend_full_says_when_to_come_back():
    first, second = StubBackend(), StubBackend(SLOW)
    first.generate = second.generate = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
    async with router({"first": first, "second": second}) as routed:
        error = await failure(routed.inference.Generate(request()))

        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "first" in error.details()
        assert "second" in error.details()
        details = rpc_status.from_call(error).details
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in details if detail.Is(retry.DESCRIPTOR))
        assert retry.retry_delay.ToMilliseconds() > 0
        assert len(first.requests) == len(second.requests) == 1
        assert len(routed.router.ledger) == 0


async def test_every_backend_failing_names_each():
    first, second = StubBackend(), StubBackend(SLOW)
    first.generate = fails(grpc.StatusCode.UNAVAILABLE, "on fire")
    second.generate = fails(grpc.StatusCode.INTERNAL, "engine broke")
    async with router({"first": first, "second": second}) as routed:
        error = await failure(routed.inference.Generate(request()))

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "on fire" in error.details()
        assert "engine broke" in error.details()


async def test_failure_where_no_other_context_is_large_enough_is_not_the_clients():
    large, small = StubBackend(), StubBackend(context_tokens=110)
    large.generate = fails(grpc.StatusCode.UNAVAILABLE, "on fire")
    async with router({"large": large, "small": small}) as routed:
        error = await failure(routed.inference.Generate(request()))

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "on fire" in error.details()
        assert "small is out: prompt of 100 + max_new_tokens of 16 is over its context of 110" in error.details()


async def test_pinned_request_goes_nowhere_else():
    first, second = StubBackend(), StubBackend(SLOW)
    first.generate = fails(grpc.StatusCode.UNAVAILABLE)
    async with router({"first": first, "second": second}) as routed:
        error = await failure(routed.inference.Generate(request(routing=pb.RoutingHints(backend="first"))))

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert second.requests == []


async def test_failure_after_the_first_token_with_nobody_else_there():
    stub = StubBackend()
    stub.generate = fails(grpc.StatusCode.INTERNAL, "engine broke", after=2)
    async with router({"first": stub}) as routed:
        call = routed.inference.Generate(request())
        received = [await call.read(), await call.read()]
        error = await failure(call)

        assert tokens(received) == [0, 1]
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "Backend first broke off after 2 tokens were sent" in error.details()
        assert len(routed.router.ledger) == 0


async def test_stream_that_just_ends_is_a_broken_one():
    async def truncated(stub, request, context):
        yield delta(1)

    stub = StubBackend()
    stub.generate = truncated
    async with router({"gpu": stub}) as routed:
        call = routed.inference.Generate(request())
        await call.read()
        error = await failure(call)

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "after 1 token was sent" in error.details()


async def test_failure_after_the_last_message_does_not_matter():
    async def late_failure(stub, request, context):
        yield delta(1)
        yield last()
        await context.abort(grpc.StatusCode.INTERNAL, "too late")

    stub = StubBackend()
    stub.generate = late_failure
    async with router({"gpu": stub}) as routed:
        assert tokens(await routed.generate()) == [1]


@pytest.mark.parametrize("sent", [0, 2])
async def test_clients_cancel_reaches_the_backend_and_frees_the_lease(sent):
    stub = StubBackend()
    stub.generate = hangs(after=sent)
    async with router({"gpu": stub}) as routed:
        call = routed.inference.Generate(request())
        for _ in range(sent):
            await call.read()
        reading = asyncio.ensure_future(call.read())
        await stub.wait(lambda stub: stub.hanging == 1)
        assert len(routed.router.ledger) == 1

        call.cancel()

        await stub.wait(lambda stub: stub.cancelled == 1)
        await routed.wait(lambda router: len(router.ledger) == 0)
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_giving_up_between_two_messages_reaches_the_backend():
    """As when the client is gone while a message is being written to it."""
    stub = StubBackend()
    stub.generate = hangs(after=1)
    async with router({"gpu": stub}) as routed:
        responses = routed.router.relay.generate(request(), Client(lambda: None, ""))
        await anext(responses)
        await stub.wait(lambda stub: stub.hanging == 1)
        await responses.aclose()

        await stub.wait(lambda stub: stub.cancelled == 1)
        assert len(routed.router.ledger) == 0


async def test_cancel_while_probing_books_nothing():
    probing = asyncio.Event()
    stub = StubBackend()

    async def never(request, context):
        probing.set()
        await asyncio.Event().wait()

    stub.probe = never
    async with router({"gpu": stub}) as routed:
        call = routed.inference.Generate(request())
        reading = asyncio.ensure_future(call.read())
        await probing.wait()
        call.cancel()

        with pytest.raises(asyncio.CancelledError):
            await reading
        stub.probe = stub.tells(100, 0)
        assert tokens(await routed.generate()) == [1, 2, 3]
        assert len(stub.requests) == 1
        assert len(routed.router.ledger) == 0


async def test_nothing_is_left_of_many_requests_with_some_cancelled():
    one, other = StubBackend(), StubBackend()
    async with router({"one": one, "other": other}) as routed:

        async def run(number: int) -> None:
            call = routed.inference.Generate(request())
            await call.read()
            if number % 5 == 0:
                call.cancel()
            else:
                assert await failure_or_end(call) is None

        for start in range(0, 200, 20):
            await asyncio.gather(*(run(number) for number in range(start, start + 20)))
        await routed.wait(lambda router: len(router.ledger) == 0)

        assert len(one.requests) + len(other.requests) == 200
        assert min(len(one.requests), len(other.requests)) > 50
        assert all(routed.router.ledger.pending(name).requests == 0 for name in ("one", "other"))


async def test_upstream_call_cut_off_here_does_not_hang_the_client():
    stub = StubBackend()
    stub.generate = hangs(after=1)
    async with router({"gpu": stub}) as routed:
        call = routed.inference.Generate(request())
        await call.read()
        await routed.router.fleet._channels["gpu"].close()

        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "after 1 token was sent" in error.details()
        assert len(routed.router.ledger) == 0


async def test_upstream_call_cut_off_here_before_the_first_token_goes_elsewhere():
    first, second = StubBackend(), StubBackend(SLOW)
    first.generate = hangs()
    async with router({"first": first, "second": second}) as routed:
        call = routed.inference.Generate(request())
        reading = asyncio.ensure_future(call.read())
        await first.wait(lambda stub: stub.hanging == 1)
        await routed.router.fleet._channels["first"].close()

        assert tokens([await reading]) == [1]
        assert len(second.requests) == 1


async def test_nothing_is_sent_before_the_first_token():
    stub = StubBackend()
    stub.generate = hangs()
    async with router({"gpu": stub}) as routed:
        call = routed.inference.Generate(request())
        headers = asyncio.ensure_future(call.initial_metadata())
        await stub.wait(lambda stub: stub.hanging == 1)
        assert not headers.done()

        stub.release.set()
        assert tokens([response async for response in call]) == [99]


async def test_a_stream_of_many_tokens_keeps_order():
    stub = StubBackend()
    stub.generate = answers(*range(2000))
    async with router({"gpu": stub}) as routed:
        assert tokens(await routed.generate()) == list(range(2000))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(prompt=pb.Prompt(text="x"), max_new_tokens=0), "max_new_tokens"),
        (pb.GenerateRequest(prompt=pb.Prompt(text="x"), sampling=pb.Sampling(top_p=float("nan"))), "sampling.top_p"),
    ],
)
async def test_invalid_requests_reach_nobody(wrong, field):
    stub = StubBackend()
    async with router({"gpu": stub}) as routed:
        error = await failure(routed.inference.Generate(wrong))

        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith(field)
        assert stub.probes == 0
