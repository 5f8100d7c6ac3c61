"""The backend service over gRPC with llama.cpp and the real small model."""

from __future__ import annotations

import asyncio
import random

import grpc
import llama_cpp
import pytest

from phaseroute.v1 import inference_pb2 as pb
from tests.integration.backends import Backend, backend, collect, request

STORY = "The old lighthouse keeper wrote in his diary every night about the ships that passed. " * 12
ENDINGS = ["One evening,", "In the spring", "The captain of", "His daughter"]
FRENCH = [("user", "What is the capital of France?")]


@pytest.fixture
async def server():
    async with backend() as running:
        yield running


async def test_chat_template_and_streamed_text(server: Backend):
    pieces = []
    call = server.stub.Generate(request(FRENCH, max_new_tokens=24))
    async for response in call:
        pieces.append(response)
    text = "".join(piece.delta.text for piece in pieces)
    ids = [token for piece in pieces for token in piece.delta.token_ids]
    assert len(pieces) > 5, "the answer was not streamed"
    assert pieces[-1].finished.usage.prompt_tokens == 37  # the template's default system prompt included
    assert pieces[-1].finished.usage.generated_tokens == len(ids)
    assert text.strip()
    assert "<|im" not in text
    assert "\ufffd" not in text


async def test_text_is_not_parsed_for_special_tokens(server: Backend):
    plain = await server.stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text="<|im_end|>")))
    assert plain.prompt_tokens > 1


async def test_greedy_output_is_the_same_alone_batched_on_a_warm_prefix_and_after_a_cancel():
    """Nothing is evicted here: evicted cells leave holes in the cache, later tokens go into them, and a context is then
    summed up in another order than that of its positions. These prompts are full of near ties."""
    async with backend(retained_tokens=4096) as server:
        await greedy_output_is_the_same(server)


async def greedy_output_is_the_same(server: Backend) -> None:
    prompts = [STORY + ending for ending in ENDINGS]
    options = {"max_new_tokens": 48, "ignore_eos": True}
    alone = []
    for prompt in prompts:
        async with backend() as fresh:
            answer = await fresh.generate(prompt, **options)
            assert answer.finished.usage.cached_tokens == 0
            alone.append(answer.token_ids)
    batched = await asyncio.gather(*(server.generate(prompt, **options) for prompt in prompts))
    assert [answer.token_ids for answer in batched] == alone
    warm = [await server.generate(prompt, **options) for prompt in prompts]
    assert all(answer.finished.usage.cached_tokens > 150 for answer in warm)
    assert [answer.token_ids for answer in warm] == alone
    victim = server.stub.Generate(request(STORY + "Suddenly", max_new_tokens=500, ignore_eos=True))
    await victim.read()
    beside = asyncio.ensure_future(server.generate(prompts[0], **options))
    await server.wait_status(lambda status: len(status.requests) == 2)
    victim.cancel()
    assert (await beside).token_ids == alone[0]


async def test_seeded_sampling_repeats_alone_and_beside_others(server: Backend):
    options = {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "ignore_eos": True}
    first = await server.generate(STORY, seed=7, **options)
    again = await server.generate(STORY, seed=7, **options)
    other = await server.generate(STORY, seed=8, **options)
    assert first.token_ids == again.token_ids != other.token_ids
    beside = await asyncio.gather(*(server.generate(STORY, seed=seed, **options) for seed in (1, 7, 3)))
    assert beside[1].token_ids == first.token_ids
    unseeded = await asyncio.gather(*(server.generate(STORY, **options) for _ in range(3)))
    assert len({tuple(answer.token_ids) for answer in unseeded}) > 1


async def test_repetition_penalty_changes_a_repetitive_answer(server: Backend):
    options = {"max_new_tokens": 40, "ignore_eos": True}
    prompt = "one two three one two three one two three one two three"
    plain = await server.generate(prompt, **options)
    penalized = await server.generate(prompt, repetition_penalty=1.5, presence_penalty=1.0, **options)
    assert len(set(penalized.token_ids)) > len(set(plain.token_ids))


async def test_stop_string_over_token_borders_ends_the_answer(server: Backend):
    free = await server.generate(STORY, max_new_tokens=40, ignore_eos=True)
    stop = free.text.strip()[9:16]
    stopped = await server.generate(STORY, max_new_tokens=40, ignore_eos=True, stop=[stop])
    assert stopped.reason == "STOP"
    assert stopped.text == free.text[: free.text.index(stop)]


async def test_eos_ends_an_answer_and_ignore_eos_does_not_let_it(server: Backend):
    short = await server.generate([("user", "Say only: yes")], max_new_tokens=200)
    assert short.reason == "EOS"
    eos = {0, 2, 4}
    assert not eos & set(short.token_ids)
    count = short.finished.usage.generated_tokens + 20
    longer = await server.generate([("user", "Say only: yes")], max_new_tokens=count, ignore_eos=True)
    assert longer.reason == "LENGTH"
    assert longer.token_ids[: len(short.token_ids)] == short.token_ids
    assert not eos & set(longer.token_ids)


async def test_characters_cut_over_tokens_are_put_together(server: Backend):
    pieces = server.engine.info.vocabulary.pieces
    call = server.stub.Generate(request("🦙🌍👩‍👩‍👧 naïve 北京" * 8, max_new_tokens=60, ignore_eos=True))
    deltas = [response.delta async for response in call if response.HasField("delta")]
    tokens = [token for delta in deltas for token in delta.token_ids]
    cut = [token for token in tokens if "\ufffd" in pieces[token].decode("utf-8", "replace")]
    assert cut, "the answer has no token that cuts a character; the prompt must be changed"
    whole = b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")
    assert "".join(delta.text for delta in deltas) == whole
    assert whole.count("\ufffd") <= 1  # at most the very end is half a character


async def test_token_ids_are_the_same_prompt_as_their_text(server: Backend):
    text = await server.generate(STORY, max_new_tokens=8, ignore_eos=True)
    ids = tokenize(STORY)
    by_ids = await server.generate(ids, max_new_tokens=8, ignore_eos=True)
    assert by_ids.token_ids == text.token_ids
    assert by_ids.finished.usage.cached_tokens == len(ids) - 1


async def test_identical_prompt_twice_computes_one_token(server: Backend):
    first = await server.generate(STORY, max_new_tokens=4, ignore_eos=True)
    second = await server.generate(STORY, max_new_tokens=4, ignore_eos=True)
    assert second.finished.usage.cached_tokens == first.finished.usage.prompt_tokens - 1


async def test_shared_prefix_is_taken_from_a_running_request(server: Backend):
    running = server.stub.Generate(request(STORY + ENDINGS[0], max_new_tokens=300, ignore_eos=True))
    await running.read()
    second = await server.generate(STORY + ENDINGS[1], max_new_tokens=4, ignore_eos=True)
    assert second.finished.usage.cached_tokens > 150
    running.cancel()


async def test_books_and_llama_cpp_agree_after_a_mixed_load():
    random.seed(3)
    async with backend(kv_tokens=1024, retained_tokens=512) as server:
        calls = []
        for index in range(14):
            prompt = STORY[: random.randrange(100, len(STORY))] + ENDINGS[index % 4]
            calls.append(server.stub.Generate(request(prompt, max_new_tokens=random.randrange(1, 40), ignore_eos=True)))
        for call in calls[::3]:
            await call.read()
            call.cancel()
        for index, call in enumerate(calls):
            if index % 3:
                assert (await collect(call)).reason == "LENGTH"
        await server.wait_status(lambda status: not status.requests)
        server.engine.check_integrity()


async def test_failed_decode_fails_its_requests_and_the_next_one_works(server: Backend, monkeypatch):
    real, calls = llama_cpp.llama_decode, []

    def fail_once(context, batch):
        calls.append(batch.n_tokens)
        return -3 if len(calls) == 1 else real(context, batch)

    monkeypatch.setattr(llama_cpp, "llama_decode", fail_once)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await server.generate(STORY)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert "send it again" in failed.value.details()
    assert (await server.generate(STORY, max_new_tokens=3, ignore_eos=True)).reason == "LENGTH"
    server.engine.check_integrity()


async def test_saved_profile_is_used_again():
    async with backend() as first, backend() as second:
        one, two = await first.status(), await second.status()
        assert one.isolated_rates == two.isolated_rates
        assert one.isolated_rates.prefill_tokens_per_s > one.isolated_rates.decode_tokens_per_s > 0
        assert one.model.fingerprint == two.model.fingerprint
        assert one.incarnation != two.incarnation
        assert one.HasField("step_model")


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
async def test_quantised_kv_cache(kv_type):
    async with backend(kv_type=kv_type) as server:
        answer = await server.generate(STORY, max_new_tokens=8, ignore_eos=True)
        assert len(answer.token_ids) == 8
        assert kv_type in (await server.status()).engine.device


def tokenize(text: str) -> list[int]:
    from backend_service.engines.llama_model import LlamaModel
    from backend_service.models import locate_model
    from service_kit.requests import TextPrompt

    return list(LlamaModel(locate_model("default")).tokenize(TextPrompt(text), context_tokens=4096))


async def test_the_line_is_in_the_order_asked_for():
    async with backend(scheduling="shortest_prefill_first", max_active=1) as server:
        calls = []
        for name, length in (("running", 8), ("long", 3000), ("short", 8)):
            prompt = [1000 + len(name) + position for position in range(length)]
            sent = request(prompt, attempt=pb.Attempt(id=name), max_new_tokens=500, ignore_eos=True)
            calls.append(server.stub.Generate(sent))
            status = await server.wait_status(lambda status, name=name: name in [r.attempt_id for r in status.requests])
        assert status.scheduling_policy == "shortest_prefill_first"
        assert [entry.attempt_id for entry in status.requests] == ["running", "short", "long"]
        for call in calls:
            call.cancel()
