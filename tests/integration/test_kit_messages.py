"""Messages that are large, too large or no messages at all."""

import grpc
import pytest

from service_kit.channels import MAX_MESSAGE_BYTES, ConnectionLimits
from tests.integration.kit import INFERENCE, ask, collect, details_of, failure, probe, serving

pytestmark = pytest.mark.timeout(60)

SERVER_BYTES = ConnectionLimits().message_bytes


@pytest.mark.parametrize(
    "raw",
    [b"\x32\x02\xff\xfe", b"\x0a\x04\x0a\x02\xff\xfe", b"\x0a\xff", b"\xff\xff\xff"],
    ids=["utf8", "nested-utf8", "cut", "garbage"],
)
@pytest.mark.parametrize("method", ["Generate", "CacheProbe"])
async def test_bytes_that_do_not_parse_are_the_clients_fault(raw: bytes, method: str) -> None:
    async with serving() as running:
        if method == "Generate":
            error = await failure(collect(running.channel.unary_stream(f"/{INFERENCE}/{method}")(raw)))
        else:
            # The same bytes in field 1, which is the prompt here as well.
            error = await failure(running.channel.unary_unary(f"/{INFERENCE}/{method}")(raw.replace(b"\x32", b"\x0a")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "UTF-8" in error.details()
        assert details_of(error)["BadRequest"].field_violations[0].field == "request"
        assert (await running.stub.CacheProbe(probe("abc"))).prompt_tokens == 3


async def test_a_5_mib_message_passes_both_ways() -> None:
    text = "x" * 5 * 1024 * 1024
    async with serving() as running:
        [first, _] = await collect(running.stub.Generate(ask(text)))
        assert first.delta.text == text


async def test_a_message_over_the_limit_is_refused_on_both_ends() -> None:
    async with serving() as running:
        error = await failure(running.stub.CacheProbe(probe("x" * (MAX_MESSAGE_BYTES + 1024))))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = await failure(running.stub.CacheProbe(probe("x" * (SERVER_BYTES + 1024))))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(SERVER_BYTES) in error.details()
        assert (await running.stub.CacheProbe(probe())).prompt_tokens == 2
