"""Scripts for stub backends that speak one language: each token is a function of all before it, and an answer that
another backend began goes on where it was. So any mistake in a continuation shows in the ids, the text, or both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

import grpc

from backend_service.text import TextStream
from phaseroute.v1 import inference_pb2 as pb
from tests.integration.stub_backend import Script, StubBackend

SAYING = "Grüße: 漢字, 😀 für 5 €. ".encode()
PIECES = tuple(bytes([token_id % 256]) for token_id in range(512))
"""One byte a token, so that most characters are cut by tokens; which of the two tokens for a byte it is hangs on
everything before."""

Break = Callable[[StubBackend, grpc.aio.ServicerContext], Awaitable[None]]
"""How an attempt ends before its time."""


def next_token(prompt: str, answer: Sequence[int]) -> int:
    """After a prompt and the tokens of the answer so far."""
    before = repr((prompt, list(answer))).encode()
    return SAYING[len(answer) % len(SAYING)] + 256 * (crc32(before) & 1)


def aborts(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, message: str = "on fire") -> Break:
    async def abort(stub, context):
        await context.abort(code, message)

    return abort


async def just_ends(stub: StubBackend, context: grpc.aio.ServicerContext) -> None:
    """The stream is over without a last message."""


async def hangs(stub: StubBackend, context: grpc.aio.ServicerContext) -> None:
    """Until it is cancelled."""
    stub.hanging += 1
    stub.changed()
    await stub.release.wait()


def speaks(breaks_after: int | None = None, how: Break | None = None, *, ends_after: int | None = None) -> Script:
    """Answers as the language has it. `breaks_after`: so many messages of this attempt were sent; `ends_after`: the
    model ends the answer after so many tokens."""
    how = how or aborts()

    async def script(stub, request, context) -> AsyncIterator[pb.GenerateResponse]:
        for sent, response in enumerate(messages(request, ends_after)):
            if sent == breaks_after:
                await how(stub, context)
                return
            yield response

    return script


def messages(request: pb.GenerateRequest, ends_after: int | None = None) -> list[pb.GenerateResponse]:
    """What a backend sends for a request that no later failure cuts short."""
    answer = list(request.attempt.generated_token_ids)
    text = TextStream(PIECES, request.stop)
    for token_id in answer:
        text.feed(token_id)
    sent = []
    while not text.stopped and len(answer) < request.max_new_tokens:
        if len(answer) == ends_after:
            if held := text.flush():
                sent.append(pb.GenerateResponse(delta=pb.Delta(text=held)))
            return [*sent, _finished(request, answer, pb.FINISH_REASON_EOS)]
        answer.append(next_token(request.prompt.text, answer))
        shown = text.feed(answer[-1])
        if len(answer) == request.max_new_tokens:
            shown += text.flush()
        sent.append(pb.GenerateResponse(delta=pb.Delta(text=shown, token_ids=answer[-1:])))
    reason = pb.FINISH_REASON_STOP if text.stopped else pb.FINISH_REASON_LENGTH
    return [*sent, _finished(request, answer, reason)]


def _finished(request: pb.GenerateRequest, answer: Sequence[int], reason: int) -> pb.GenerateResponse:
    usage = pb.Usage(prompt_tokens=len(request.prompt.text), generated_tokens=len(answer))
    return pb.GenerateResponse(finished=pb.Finished(finish_reason=reason, usage=usage))


@dataclass(frozen=True)
class Said:
    """An answer as a client has it."""

    token_ids: list[int]
    text: str
    reason: int
    generated_tokens: int


def said(responses: Sequence[pb.GenerateResponse]) -> Said:
    """Of a whole stream."""
    *deltas, last = responses
    assert all(response.HasField("delta") for response in deltas)
    return Said(
        [token_id for response in deltas for token_id in response.delta.token_ids],
        "".join(response.delta.text for response in deltas),
        last.finished.finish_reason,
        last.finished.usage.generated_tokens,
    )
