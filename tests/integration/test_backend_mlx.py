"""The backend service over gRPC with MLX and the real small model on a CPU."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from phaseroute.v1 import inference_pb2 as pb
from tests.integration.backends import Backend, backend, collect, request

pytest.importorskip("mlx.core", exc_type=ImportError)

STORY = "The old lighthouse keeper wrote in his diary every night about the ships that passed. " * 4


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return {"engine": "mlx", "device": "cpu", "kv_tokens": 2048}


async def test_a_backend_from_its_first_status_to_its_last_answer(settings):
    """One load for all of it: that takes seconds."""
    async with backend(**settings) as server:
        await status_says_what_runs(server)
        await answers_are_streamed_and_right(server)
        await a_warm_prefix_is_promised_credited_and_gives_the_same_answer(server)
        await seeds_repeat(server)
        await a_stop_string_ends_an_answer(server)
        await bad_input_is_refused_and_the_next_request_works(server)
        await a_cancel_frees_its_place_and_keeps_what_was_computed(server)
        server.engine.check_integrity()


async def status_says_what_runs(server: Backend) -> None:
    status = await server.status()
    assert (status.engine.name, status.engine.simulated) == ("mlx", False)
    assert status.engine.device.startswith("CPU, 1 thread")
    assert status.model.name == "SmolLM2-135M-Instruct.Q4_1"
    assert status.model.precision == "q4_1 as f32"
    assert status.kv_cache.capacity_tokens == 2048
    assert status.isolated_rates.prefill_tokens_per_s > status.isolated_rates.decode_tokens_per_s > 0
    assert status.step_model.samples >= 16


async def answers_are_streamed_and_right(server: Backend) -> None:
    pieces = []
    async for response in server.stub.Generate(
        request([("user", "What is the capital of France?")], max_new_tokens=12)
    ):
        pieces.append(response)
    assert len(pieces) > 4, "the answer was not streamed"
    assert "Paris" in "".join(piece.delta.text for piece in pieces)
    assert pieces[-1].finished.usage.prompt_tokens == 37


async def a_warm_prefix_is_promised_credited_and_gives_the_same_answer(server: Backend) -> None:
    options = {"max_new_tokens": 12, "ignore_eos": True}
    cold = await server.generate(STORY, **options)
    assert cold.finished.usage.cached_tokens == 0
    probe = await server.stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text=STORY)))
    assert probe.reusable_tokens == probe.prompt_tokens - 1
    warm, beside = await asyncio.gather(
        server.generate(STORY, **options), server.generate(STORY + "Suddenly", **options)
    )
    assert warm.finished.usage.cached_tokens == probe.reusable_tokens
    assert beside.finished.usage.cached_tokens > 60
    assert warm.token_ids == cold.token_ids


async def seeds_repeat(server: Backend) -> None:
    options = {"max_new_tokens": 10, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "ignore_eos": True}
    first = await server.generate(STORY, seed=7, **options)
    again = await server.generate(STORY, seed=7, **options)
    other = await server.generate(STORY, seed=8, **options)
    assert first.token_ids == again.token_ids != other.token_ids


async def a_stop_string_ends_an_answer(server: Backend) -> None:
    free = await server.generate("Monday, Tuesday, Wednesday,", max_new_tokens=12)
    assert "Thursday" in free.text
    stopped = await server.generate("Monday, Tuesday, Wednesday,", max_new_tokens=12, stop=["ursday"])
    assert stopped.reason == "STOP"
    assert stopped.text == free.text[: free.text.index("ursday")]


async def bad_input_is_refused_and_the_next_request_works(server: Backend) -> None:
    for wrong, says in [
        (request([1, 2, 49152], max_new_tokens=4), "tokenize with this model"),
        (request("Hello", max_new_tokens=5000), "context of 2048"),
        (request("word " * 4000, max_new_tokens=4), "context of 2048"),
        (request("Hello", temperature=-1.0), "choose a value"),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(server.stub.Generate(wrong))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert says in refused.value.details()
    assert (await server.generate("Hello", max_new_tokens=2)).finished.usage.generated_tokens > 0


async def a_cancel_frees_its_place_and_keeps_what_was_computed(server: Backend) -> None:
    text = "An island far away in the north was home to many birds. " * 4
    victim = server.stub.Generate(request(text, max_new_tokens=500, ignore_eos=True))
    await victim.read()
    victim.cancel()
    await server.wait_status(lambda status: not status.requests)
    probe = await server.stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text=text)))
    assert probe.reusable_tokens == probe.prompt_tokens - 1
