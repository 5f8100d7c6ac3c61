"""Bad input against llama.cpp with the real model, directly and through a router: the right code, one sentence that
says what to do, nothing crashes, and the next request works."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
import pytest

from phaseroute.v1 import inference_pb2 as pb
from tests.e2e.stacks import stack
from tests.integration.backends import backend, collect, request

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    name: str
    request: pb.GenerateRequest | bytes
    code: grpc.StatusCode
    says: str
    """Part of the message."""
    router_only: bool = False


def case(name, says, prompt="Hello", code=INVALID, *, router_only=False, **options):
    return Case(name, request(prompt, **options), code, says, router_only)


def broken_text() -> bytes:
    """A GenerateRequest whose prompt text is no UTF-8."""
    good = pb.GenerateRequest(prompt=pb.Prompt(text="####")).SerializeToString()
    return good.replace(b"####", b"\xff\xfe##")


CASES = [
    Case("no prompt", pb.GenerateRequest(), INVALID, "set one of text, chat or token_ids"),
    Case("empty text", pb.GenerateRequest(prompt=pb.Prompt(text="")), INVALID, "send at least one character"),
    Case("empty chat", pb.GenerateRequest(prompt=pb.Prompt(chat=pb.Chat())), INVALID, "send at least one message"),
    case("chat without content", "write something", prompt=[("user", "")]),
    case("chat without role", "role", prompt=[("", "hello")]),
    Case("no ids", pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds())), INVALID, "at least one token id"),
    case("id past the vocabulary", "tokenize with this model", prompt=[1, 2, 49152]),
    case("absurd id", "tokenize with this model", prompt=[2**32 - 1]),
    case("no new tokens", "ask for at least 1", max_new_tokens=0),
    case("negative new tokens", "ask for at least 1", max_new_tokens=-5),
    case("huge new tokens", "context of 4096", max_new_tokens=2**31 - 1),
    case("prompt and answer over the context", "context of 4096", prompt="word " * 4000, max_new_tokens=500),
    case("ids over the context", "context of 4096", prompt=[5] * 5000, max_new_tokens=1),
    case("15 MB of text", "shorten it", prompt="lorem ipsum " * (15_000_000 // 12)),
    case(
        "20 MB of text",
        "larger than max",
        code=grpc.StatusCode.RESOURCE_EXHAUSTED,
        prompt="lorem ipsum " * (20_000_000 // 12),
    ),
    case("NaN temperature", "choose a value in [0, 5]", temperature=NAN),
    case("negative temperature", "choose a value in [0, 5]", temperature=-1),
    case("infinite temperature", "choose a value in [0, 5]", temperature=float("inf")),
    case("zero top_p", "choose a value in (0, 1]", top_p=0),
    case("NaN top_p", "choose a value in (0, 1]", top_p=NAN),
    case("top_p over 1", "choose a value in (0, 1]", top_p=1.5),
    case("negative top_k", "choose a value in [0,", top_k=-1),
    case("absurd top_k", "choose a value in [0,", top_k=2**31 - 1),
    case("min_p of 1", "choose a value in [0, 1)", min_p=1),
    case("zero repetition penalty", "choose a value in (0, 10]", repetition_penalty=0),
    case("NaN frequency penalty", "choose a value in [-2, 2]", frequency_penalty=NAN),
    case("absurd presence penalty", "choose a value in [-2, 2]", presence_penalty=1e30),
    case("empty stop string", "leave it out", stop=[""]),
    case("too many stop strings", "send at most 16", stop=["x"] * 17),
    case("huge stop string", "shorten it", stop=["x" * 5000]),
    case("huge label", "use a short name", workload="w" * 1000),
    Case("text that is no UTF-8", broken_text(), INVALID, "UTF-8"),
    Case("no message at all", b"\xff\xff\xff\xff", INVALID, "valid message"),
    case("unknown model", "SmolLM2", code=NOT_FOUND, model="gpt-17"),
    case("unknown policy", "two_phase", routing=pb.RoutingHints(policy="fastest"), code=INVALID, router_only=True),
    case("unknown pinned backend", "only", routing=pb.RoutingHints(backend="mars"), code=NOT_FOUND, router_only=True),
]


@pytest.mark.parametrize("through_router", [False, True], ids=["backend", "router"])
async def test_bad_input(through_router):
    async with AsyncExitStack() as exits:
        if through_router:
            target = await exits.enter_async_context(stack({"only": {}}))
        else:
            target = await exits.enter_async_context(backend())
        raw = target.channel.unary_stream(
            "/phaseroute.v1.InferenceService/Generate", response_deserializer=pb.GenerateResponse.FromString
        )
        for bad in CASES:
            if bad.router_only and not through_router:
                continue
            body = bad.request if isinstance(bad.request, bytes) else bad.request.SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await collect(raw(body, timeout=60))
            assert refused.value.code() is bad.code, f"{bad.name}: {refused.value.details()}"
            assert bad.says in refused.value.details(), f"{bad.name}: {refused.value.details()}"
            assert len(refused.value.details()) < 600, bad.name
            good = await target.generate("Hello", max_new_tokens=1)
            assert good.finished.usage.generated_tokens <= 1, bad.name


async def test_request_that_excludes_every_backend_is_told_so():
    async with stack({"only": {}}) as router:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.generate("Hello", routing=pb.RoutingHints(excluded_backends=["only"]))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the request excludes it" in refused.value.details()
        assert (await router.generate("Hello", max_new_tokens=1)).finished
