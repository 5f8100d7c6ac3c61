"""Real backends behind a router: whatever breaks one of them in mid-stream, the answer is the undisturbed one."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from tests.e2e.stacks import Stack, stack
from tests.integration.backends import Answer, collect, request

SLOWLY = {"engine": "simulated", "simulated_prefill_rate": 20_000.0, "simulated_decode_ms": "1:5,4:8"}
"""Slow enough to be caught in the act."""
OPTIONS = {"max_new_tokens": 80, "ignore_eos": True}


@asynccontextmanager
async def pair():
    async with stack({"one": SLOWLY, "other": SLOWLY}) as running:
        yield running


async def broken_into(running: Stack, tokens: int, break_it, prompt="once upon a time", **options) -> Answer:
    """An answer in which, after so many tokens, something happens to the backend that it comes from."""
    watch = running.router.WatchDecisions(router_pb2.WatchDecisionsRequest())
    await watch.initial_metadata()
    call = running.stub.Generate(request(prompt, **{**OPTIONS, **options}))
    received = []
    while sum(len(response.delta.token_ids) for response in received) < tokens:
        received.append(await call.read())
    decision = (await watch.read()).decision
    watch.cancel()
    await break_it(running.backends[decision.selected])

    async def all_of_it():
        for response in received:
            yield response
        while (response := await call.read()) is not grpc.aio.EOF:
            yield response

    answer = await collect(all_of_it())
    assert answer.finished.routing.backend != decision.selected
    return answer


def same(answer: Answer, undisturbed: Answer) -> bool:
    """In all that a client can see but times and what was in a cache."""
    one, other = (
        (each.text, each.token_ids, each.reason, usage.prompt_tokens, usage.generated_tokens)
        for each in (answer, undisturbed)
        for usage in (each.finished.usage,)
    )
    return one == other


async def stop_server(backend) -> None:
    await backend.server._server.stop(None)


async def break_engine(backend) -> None:
    def broken(*_):
        raise RuntimeError("the engine is broken")

    backend.engine.step = broken


@pytest.mark.parametrize("break_it", [stop_server, break_engine])
async def test_stream_goes_on_with_the_same_answer(break_it):
    async with pair() as running:
        answer = await broken_into(running, 10, break_it)
        undisturbed = await running.generate("once upon a time", **OPTIONS)

        assert same(answer, undisturbed)
        assert answer.finished.routing.continuations == 1
        assert len(answer.token_ids) == 80
        assert len(running.hosted.router.ledger) == 0


async def test_seeded_answer_goes_on_as_it_would_have():
    async with pair() as running:
        sampled = {"temperature": 0.8, "seed": 7}
        answer = await broken_into(running, 10, break_engine, **sampled)

        assert same(answer, await running.generate("once upon a time", **OPTIONS, **sampled))


async def test_stop_string_of_the_undisturbed_answer_ends_the_broken_one_too():
    async with pair() as running:
        whole = await running.generate("once upon a time", **OPTIONS)
        # Begins well after the cut, wherever exactly that is.
        stop = whole.text[60:66]
        answer = await broken_into(running, 10, break_engine, stop=[stop])

        assert same(answer, await running.generate("once upon a time", stop=[stop], **OPTIONS))
        assert answer.reason == "STOP"


async def test_end_token_comes_at_the_same_place():
    async with pair() as running:
        options = {"max_new_tokens": 2000, "ignore_eos": False}
        answer = await broken_into(running, 10, break_engine, prompt="tale 3", **options)

        assert same(answer, await running.generate("tale 3", **options))
        assert answer.reason == "EOS"


async def test_queued_streams_go_on_elsewhere_too():
    async with stack({"one": {**SLOWLY, "max_active": 1}, "other": SLOWLY}) as running:
        in_turns = {**OPTIONS, "routing": pb.RoutingHints(policy="round_robin")}
        running_on_both = [asyncio.ensure_future(running.generate(f"tale {index}", **in_turns)) for index in range(6)]
        await running.backends["one"].wait_status(lambda status: len(status.requests) >= 2)
        await break_engine(running.backends["one"])
        answers = await asyncio.gather(*running_on_both)

        assert {answer.finished.routing.backend for answer in answers} == {"other"}
        for index, answer in enumerate(answers):
            assert same(answer, await running.generate(f"tale {index}", **OPTIONS))
        status = await running.backends["other"].status()
        assert list(status.requests) == []


async def test_cancelled_continuation_frees_its_place():
    async with pair() as running:
        call = running.stub.Generate(request("once upon a time", max_new_tokens=2000, ignore_eos=True))
        for _ in range(5):
            await call.read()
        (serving,) = [one for one in running.backends.values() if (await one.status()).requests]
        (other,) = [one for one in running.backends.values() if one is not serving]
        await break_engine(serving)
        reading = asyncio.ensure_future(read_on(call))
        await other.wait_status(lambda status: any(each.generated_tokens > 20 for each in status.requests))
        call.cancel()

        await other.wait_status(lambda status: not status.requests)
        with pytest.raises(asyncio.CancelledError):
            await reading
        ledger, changes = running.hosted.router.ledger, running.hosted.router.fleet.changes
        with changes.subscribe() as news:
            while len(ledger):
                await news.get()


async def read_on(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
