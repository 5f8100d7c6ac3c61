"""An answer whose backend is lost goes on elsewhere, as one stream."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from router_service.backend import State
from router_service.relay import Client
from service_kit.identity import Caller, Scope
from tests.integration.speaking import SAYING, aborts, hangs, just_ends, messages, said, speaks
from tests.integration.stub_backend import FAST, SLOW, RouterUnderTest, StubBackend, request, router

SLOWER, SLOWEST = (40.0, 20.0), (20.0, 10.0)


@asynccontextmanager
async def chain(*scripts, **settings):
    """A router before backends that it prefers in this order, which are yielded too."""
    stubs = []
    for script, rates in zip(scripts, (FAST, SLOW, SLOWER, SLOWEST), strict=False):
        stubs.append(StubBackend(rates))
        stubs[-1].generate = script
    names = ("first", "second", "third", "fourth")
    async with router(dict(zip(names, stubs, strict=False)), **settings) as routed:
        yield routed, *stubs


def expected(**options):
    """What an undisturbed backend says."""
    ends_after = options.pop("ends_after", None)
    return said(messages(request(**options), ends_after))


async def rest(call) -> list[pb.GenerateResponse]:
    """What is still to come."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return caught.value


def metadata_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in rpc_status.from_call(error).details if detail.Is(info.DESCRIPTOR))
    return dict(info.metadata)


async def nothing_left(routed: RouterUnderTest, *stubs: StubBackend) -> None:
    """No lease, and no call that a backend still works on."""
    await routed.wait(lambda router: len(router.ledger) == 0)
    for stub in stubs:
        await stub.wait(lambda stub: stub.running == 0)


@pytest.mark.parametrize("sent", range(1, len(SAYING) + 1, 3))
async def test_answer_goes_on_elsewhere_as_one_stream(sent):
    async with chain(speaks(sent), speaks()) as (routed, first, second):
        responses = await routed.generate(max_new_tokens=40)

        assert said(responses) == expected(max_new_tokens=40)
        assert list(second.requests[0].attempt.generated_token_ids) == expected(max_new_tokens=40).token_ids[:sent]
        assert second.requests[0].max_new_tokens == 40
        assert first.requests[0].attempt.id != second.requests[0].attempt.id
        record = responses[-1].finished.routing
        assert (record.backend, record.attempts, record.continuations) == ("second", 2, 1)
        assert 0 < record.actual_ttft_s < record.actual_finish_s
        await nothing_left(routed, first, second)


@pytest.mark.parametrize(
    "how",
    [
        aborts(grpc.StatusCode.UNAVAILABLE),
        aborts(grpc.StatusCode.INTERNAL),
        aborts(grpc.StatusCode.UNKNOWN),
        aborts(grpc.StatusCode.CANCELLED),
        just_ends,
    ],
)
async def test_however_the_stream_breaks(how):
    async with chain(speaks(5, how), speaks()) as (routed, first, second):
        assert said(await routed.generate()) == expected()
        await nothing_left(routed, first, second)


async def test_server_that_is_gone_in_mid_stream():
    async with chain(speaks(5, hangs), speaks()) as (routed, first, second):
        call = routed.inference.Generate(request())
        received = [await call.read() for _ in range(5)]
        await first.server.stop(None)

        assert said([*received, *await rest(call)]) == expected()
        await nothing_left(routed, second)


async def test_channel_closed_under_a_call():
    async with chain(speaks(5, hangs), speaks()) as (routed, first, second):
        call = routed.inference.Generate(request())
        received = [await call.read() for _ in range(5)]
        await routed.router.fleet._channels["first"].close()

        assert said([*received, *await rest(call)]) == expected()
        await nothing_left(routed, first, second)


async def test_fleet_taken_away_under_a_call_ends_it_with_a_status():
    async with chain(speaks(5, hangs)) as (routed, first):
        call = routed.inference.Generate(request())
        for _ in range(5):
            await call.read()
        await routed.router.fleet.__aexit__(None, None, None)

        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert metadata_of(error) == {"generated_tokens": "5", "attempts": "1", "backend": "first"}
        await nothing_left(routed, first)


@pytest.mark.parametrize("sent", [0, 5])
async def test_backend_that_says_nothing_any_more_is_given_up(sent):
    """As when its process is stopped or the network cut: no stream ends by that."""
    async with chain(speaks(sent, hangs), speaks(), status_silence_s=0.5) as (routed, first, second):
        second_speaks = asyncio.ensure_future(keep_speaking(second))
        responses = await routed.generate()
        second_speaks.cancel()

        assert said(responses) == expected()
        record = responses[-1].finished.routing
        assert (record.attempts, record.continuations) == (2, int(sent > 0))
        await nothing_left(routed, first, second)


async def keep_speaking(stub: StubBackend) -> None:
    while True:
        stub.push()
        await asyncio.sleep(0.1)


async def test_another_process_in_the_backends_place_gives_its_calls_up():
    async with chain(speaks(5, hangs), speaks()) as (routed, first, second):
        call = routed.inference.Generate(request())
        received = [await call.read() for _ in range(5)]
        first.generate = speaks()
        first.push(incarnation="second", sequence=1)

        responses = [*received, *await rest(call)]
        assert said(responses) == expected()
        # Started anew, it may be asked again; and it is the fastest.
        assert responses[-1].finished.routing.backend == "first"
        assert len(first.requests) == 2
        await nothing_left(routed, first, second)


async def test_same_process_is_not_asked_again():
    async with chain(speaks(5)) as (routed, first):
        error = await failure(routed.inference.Generate(request()))

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert len(first.requests) == 1


async def test_same_process_goes_on_after_a_rest_where_nobody_else_is_there():
    async with chain(speaks(5), continue_wait_s=30.0) as (routed, first):
        answer = said(await rest(routed.inference.Generate(request(max_new_tokens=14))))

        assert answer == expected(max_new_tokens=14)
        assert [len(asked.attempt.generated_token_ids) for asked in first.requests] == [0, 5, 10]


async def test_answer_waits_for_a_backend_no_longer_than_it_is_told_to():
    async with chain(speaks(5, hangs), continue_wait_s=0.3) as (routed, first):
        call = routed.inference.Generate(request())
        for _ in range(5):
            await call.read()
        await first.server.stop(None)
        error = await failure(call)

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "5 tokens" in error.details()


async def test_watcher_that_is_lost_itself_ends_in_a_status():
    async with chain(speaks(5, hangs)) as (routed, first):
        watching = []

        async def until_lost(name, incarnation):
            watching.append(asyncio.current_task())
            await asyncio.Event().wait()

        routed.router.fleet.until_lost = until_lost
        call = routed.inference.Generate(request())
        for _ in range(5):
            await call.read()
        watching[0].cancel()

        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await nothing_left(routed, first)


async def test_failing_watcher_ends_in_a_status():
    async with chain(speaks(5, hangs)) as (routed, first):

        async def until_lost(name, incarnation):
            raise KeyError(name)

        routed.router.fleet.until_lost = until_lost
        error = await failure(routed.inference.Generate(request()))
        assert error.code() is grpc.StatusCode.INTERNAL
        await nothing_left(routed, first)


@pytest.mark.parametrize("sent", range(1, 10))
async def test_stop_string_across_the_cut(sent):
    stop = ["ße: 漢", "never"]
    async with chain(speaks(sent), speaks()) as (routed, _, _second):
        responses = await routed.generate(stop=stop, max_new_tokens=60)

        assert said(responses) == expected(stop=stop, max_new_tokens=60)
        assert said(responses).text == "Grü"
        assert said(responses).reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize("max_new_tokens", [4, 10, 11])
async def test_all_tokens_were_sent_and_only_the_end_is_lost(max_new_tokens):
    """4 end in half a character; with 11 what may become a stop string is held back."""
    stop = ["漢字!"]
    async with chain(speaks(max_new_tokens), speaks()) as (routed, first, second):
        responses = await routed.generate(stop=stop, max_new_tokens=max_new_tokens)

        assert said(responses) == expected(stop=stop, max_new_tokens=max_new_tokens)
        assert len(second.requests[0].attempt.generated_token_ids) == max_new_tokens
        await nothing_left(routed, first, second)


@pytest.mark.parametrize("sent", [10, 11, 12])
async def test_text_held_back_to_the_end_is_sent_once(sent):
    """The model ends after 11 tokens, within a character and with a possible stop string held back: text without a
    token id comes before the end."""
    stop = ["漢字!"]
    async with chain(speaks(sent, ends_after=11), speaks(ends_after=11)) as (routed, _, _second):
        responses = await routed.generate(stop=stop)

        assert said(responses) == expected(stop=stop, ends_after=11)
        assert said(responses).text == "Grüße: �"


async def test_text_that_no_token_stands_for_cannot_go_on_elsewhere():
    async def wordy(stub, request, context):
        for _ in range(3):
            yield pb.GenerateResponse(delta=pb.Delta(text="blah "))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "on fire")

    async with chain(wordy, speaks()) as (routed, _, second):
        error = await failure(routed.inference.Generate(request()))

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "without its token ids" in error.details()
        assert second.requests == []


async def test_continuation_that_is_lost_again():
    async with chain(speaks(5), speaks(7), speaks(0), speaks()) as (routed, *stubs):
        responses = await routed.generate(max_new_tokens=30)

        assert said(responses) == expected(max_new_tokens=30)
        assert [len(stub.requests[0].attempt.generated_token_ids) for stub in stubs] == [0, 5, 12, 12]
        record = responses[-1].finished.routing
        assert (record.backend, record.attempts, record.continuations) == ("fourth", 4, 2)
        await nothing_left(routed, *stubs)


async def test_all_backends_lost_accounts_for_what_was_sent():
    async with chain(speaks(5), speaks(1)) as (routed, *stubs):
        call = routed.inference.Generate(request())
        received = [await call.read() for _ in range(6)]
        error = await failure(call)

        assert [token_id for r in received for token_id in r.delta.token_ids] == expected().token_ids[:6]
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details().startswith("Backend second broke off after 6 tokens were sent (on fire)")
        assert error.details().endswith("send the request again to start over.")
        assert metadata_of(error) == {"generated_tokens": "6", "attempts": "2", "backend": "second"}
        await nothing_left(routed, *stubs)


async def test_no_more_attempts_than_allowed():
    async with chain(speaks(1), speaks(1), speaks(), max_attempts=2) as (routed, _, _second, third):
        error = await failure(routed.inference.Generate(request()))

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "gives up after 2 failed attempts" in error.details()
        assert third.requests == []


async def test_no_more_attempts_than_allowed_before_the_first_token():
    async with chain(speaks(0), speaks(0), speaks(), max_attempts=2) as (routed, _, _second, third):
        error = await failure(routed.inference.Generate(request()))

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "2 attempts failed, the last on backend second (on fire)" in error.details()
        assert metadata_of(error) == {"generated_tokens": "0", "attempts": "2", "backend": "second"}
        assert third.requests == []


async def test_full_backends_do_not_count_as_attempts():
    full = speaks(0, aborts(grpc.StatusCode.RESOURCE_EXHAUSTED))
    async with chain(full, full, speaks(3), speaks(), max_attempts=2) as (routed, *_):
        assert said(await routed.generate()) == expected()


@pytest.mark.parametrize(("sent", "goes_on"), [(5, True), (6, False)])
async def test_long_answers_are_not_computed_again(sent, goes_on):
    async with chain(speaks(sent), speaks(), max_replayed_tokens=5) as (routed, _, second):
        if goes_on:
            assert said(await routed.generate()) == expected()
        else:
            error = await failure(routed.inference.Generate(request()))
            assert "more than 5 tokens" in error.details()
            assert metadata_of(error)["generated_tokens"] == "6"
            assert second.requests == []


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT])
async def test_what_another_backend_would_do_too_is_passed_on(code):
    """A client that does not read, for one, reads no faster elsewhere."""
    async with chain(speaks(5, aborts(code, "read faster")), speaks()) as (routed, _, second):
        error = await failure(routed.inference.Generate(request()))

        assert (error.code(), error.details()) == (code, "read faster")
        assert second.requests == []


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT])
async def test_refused_continuation_goes_to_the_next(code):
    """The request was good enough for the first backend."""
    async with chain(speaks(5), speaks(0, aborts(code)), speaks()) as (routed, *_):
        responses = await routed.generate()

        assert said(responses) == expected()
        record = responses[-1].finished.routing
        assert (record.backend, record.attempts, record.continuations) == ("third", 3, 1)


async def test_refused_continuation_without_another_backend_is_no_fault_of_the_request():
    async with chain(speaks(5), speaks(0, aborts(grpc.StatusCode.INVALID_ARGUMENT))) as (routed, *_):
        error = await failure(routed.inference.Generate(request()))

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert metadata_of(error)["generated_tokens"] == "5"


async def test_pinned_request_does_not_go_on_elsewhere():
    async with chain(speaks(5), speaks()) as (routed, _, second):
        error = await failure(routed.inference.Generate(request(routing=pb.RoutingHints(backend="first"))))

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "pinned to first" in error.details()
        assert second.requests == []


async def test_first_token_that_came_in_time_need_not_come_again():
    hints = pb.RoutingHints(ttft_slo_s=0.5)
    async with chain(speaks(5), speaks()) as (routed, *_):
        # The second takes longer than that for a prompt of 100 tokens.
        assert said(await routed.generate(routing=hints)) == expected()


@pytest.mark.parametrize("sent", [7, 16])
async def test_continuation_is_forecast(sent):
    """Also one that only the last message is missing of."""
    async with chain(speaks(sent), speaks()) as (routed, *stubs):
        for stub, step_s in zip(stubs, (0.01, 0.1), strict=True):
            stub.status.step_model.CopyFrom(pb.StepModel(base_s=step_s, per_token_s=1e-6, samples=99))
            stub.push()
        await routed.wait(lambda router: all(each.snapshot.sequence == 2 for each in router.fleet.backends.values()))
        responses = await routed.generate()

        assert said(responses) == expected()
        record = responses[-1].finished.routing
        assert (record.backend, record.continuations) == ("second", 1)
        assert record.predicted_finish_s >= record.predicted_ttft_s > 0


async def test_deadline_that_passes_during_a_continuation():
    """Nobody can keep it, but the client has what comes until then."""
    async with chain(speaks(5), speaks(2, hangs)) as (routed, first, second):
        call = routed.inference.Generate(request(), timeout=1.5)
        for _ in range(7):
            await call.read()
        error = await failure(call)

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert second.time_left_s[0] < first.time_left_s[0] + 1.0
        await nothing_left(routed, first, second)


async def test_cancel_during_a_continuation():
    async with chain(speaks(5), speaks(2, hangs)) as (routed, first, second):
        call = routed.inference.Generate(request())
        for _ in range(7):
            await call.read()
        await second.wait(lambda stub: stub.hanging == 1)
        call.cancel()

        await nothing_left(routed, first, second)
        assert second.cancelled == 1


async def test_cancel_while_it_is_decided_where_to_go_on():
    probing = asyncio.Event()

    async def never(request, context):
        probing.set()
        await asyncio.Event().wait()

    async with chain(speaks(5, hangs), speaks()) as (routed, first, second):
        call = routed.inference.Generate(request())
        for _ in range(5):
            await call.read()
        second.probe = never
        await first.server.stop(None)
        await probing.wait()
        call.cancel()

        await nothing_left(routed, second)
        assert second.requests == []


async def test_giving_up_between_two_attempts():
    """As when the client is gone while the last message of a lost backend is being written to it."""
    async with chain(speaks(5, hangs), speaks()) as (routed, first, second):
        responses = routed.router.relay.generate(request(), Client(lambda: None, ""))
        for _ in range(5):
            await anext(responses)
        await first.server.stop(None)
        await responses.aclose()

        await nothing_left(routed, second)
        assert second.requests == []


async def test_client_that_is_slow_reads_on_where_it_was():
    """The backend is lost while what it sent is still on its way."""
    async with chain(speaks(5), speaks()) as (routed, *_):
        responses = []
        async for response in routed.router.relay.generate(request(), Client(lambda: None, "")):
            responses.append(response)
            await asyncio.sleep(0.01)
        assert said(responses) == expected()


async def test_breakers_hear_how_each_attempt_ended():
    async with chain(speaks(5, aborts(grpc.StatusCode.INTERNAL)), speaks(2, hangs)) as (routed, _, second):
        heard = []
        routed.router.fleet.attempt_over = lambda name, incarnation, failure: heard.append((name, failure))
        call = routed.inference.Generate(request())
        for _ in range(7):
            await call.read()
        assert [(name, failure.code) for name, failure in heard] == [("first", grpc.StatusCode.INTERNAL)]

        call.cancel()
        await nothing_left(routed, second)
        assert heard[1:] == [("second", None)]


async def test_each_attempt_is_a_decision_with_an_outcome():
    async with chain(speaks(5, aborts(grpc.StatusCode.INTERNAL)), speaks()) as (routed, *_):
        watch = routed.admin.WatchDecisions(router_pb2.WatchDecisionsRequest())
        await watch.initial_metadata()
        await routed.generate()
        news = [await watch.read() for _ in range(4)]

        assert [message.decision.attempt for message in news[::2]] == [1, 2]
        assert [message.decision.selected for message in news[::2]] == ["first", "second"]
        assert [message.outcome.code for message in news[1::2]] == ["INTERNAL", "OK"]
        assert [message.outcome.routing.continuations for message in news[1::2]] == [0, 1]
        watch.cancel()


async def test_answer_that_another_router_had_begun_comes_first():
    begun = expected().token_ids[:4]
    async with chain(speaks(3), speaks()) as (routed, first, second):
        sent = request(attempt=pb.Attempt(id="a", generated_token_ids=begun))
        responses = [response async for response in routed.inference.Generate(sent)]

        assert said(responses).token_ids == expected().token_ids[4:]
        assert said(responses).generated_tokens == 16
        assert list(first.requests[0].attempt.generated_token_ids) == begun
        assert list(second.requests[0].attempt.generated_token_ids) == expected().token_ids[:7]


async def test_router_behind_a_router():
    async with AsyncExitStack() as stack:
        inner, first, _ = await stack.enter_async_context(chain(speaks(5), speaks(7)))
        last = StubBackend(SLOWEST)
        last.generate = speaks()
        outer = await stack.enter_async_context(router({"inner": inner.server.target, "last": last}))
        await outer.wait_state("inner", State.SERVING)
        responses = await outer.generate(max_new_tokens=30)

        assert said(responses) == expected(max_new_tokens=30)
        assert len(first.requests) == 1
        record = responses[-1].finished.routing
        assert (record.backend, record.attempts, record.continuations) == ("last", 2, 1)


async def test_who_asks_is_forwarded():
    caller = Caller("ann", frozenset({Scope.GENERATE}), cache_salt="pepper")
    begun = pb.Attempt(id="a", client="bob", cache_salt="other", generated_token_ids=[71, 114])
    async with chain(speaks()) as (routed, first):
        client = Client(lambda: None, "", caller)
        responses = [r async for r in routed.router.relay.generate(request(attempt=begun), client)]

        attempt = first.requests[0].attempt
        assert (attempt.client, attempt.cache_salt) == ("ann", "pepper")
        # Only a router is believed what there is of an answer.
        assert list(attempt.generated_token_ids) == []
        assert said(responses) == expected()


async def test_router_speaks_for_its_clients():
    caller = Caller("outer", frozenset(Scope), cache_salt="pepper")
    begun = pb.Attempt(id="a", client="bob", cache_salt="salt of bob")
    async with chain(speaks()) as (routed, first):
        client = Client(lambda: None, "", caller)
        assert [r async for r in routed.router.relay.generate(request(attempt=begun), client)]

        attempt = first.requests[0].attempt
        assert (attempt.client, attempt.cache_salt) == ("bob", "salt of bob")
