"""Real backends in this process for tests: engine thread, gRPC server, loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from backend_service.engines.base import Engine
from backend_service.host import host
from backend_service.settings import BackendSettings
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit.channels import open_channel
from service_kit.serve import Server

FAST = {"engine": "simulated", "simulated_prefill_rate": 100_000.0, "simulated_decode_ms": "1:1,4:2"}
"""A simulated engine that is done at once."""


@dataclass
class Backend:
    """A served backend and a client of it."""

    server: Server
    channel: grpc.aio.Channel
    engine: Engine
    """For integrity checks while nothing runs."""
    stub: pb_grpc.InferenceServiceStub = field(init=False)

    def __post_init__(self):
        self.stub = pb_grpc.InferenceServiceStub(self.channel)

    async def status(self) -> pb.BackendStatus:
        return (await self.stub.Status(pb.StatusRequest())).status

    async def wait_status(self, condition) -> pb.BackendStatus:
        """The first Status, as pushed, for which `condition` holds."""
        return await first_status(self.stub, condition)

    async def generate(self, prompt, **options) -> Answer:
        return await collect(self.stub.Generate(request(prompt, **options)))


@dataclass(frozen=True)
class Answer:
    text: str
    token_ids: list[int]
    finished: pb.Finished

    @property
    def reason(self) -> str:
        return pb.FinishReason.Name(self.finished.finish_reason).removeprefix("FINISH_REASON_")


@asynccontextmanager
async def backend(**settings) -> AsyncIterator[Backend]:
    """A backend on a free port with these settings."""
    async with (
        host(BackendSettings(listen="127.0.0.1:0", **settings)) as hosted,
        open_channel(hosted.server.target) as channel,
    ):
        yield Backend(hosted.server, channel, hosted.runner.engine)


async def first_status(stub: pb_grpc.InferenceServiceStub, condition) -> pb.BackendStatus:
    """The first Status, as a backend or a router pushes it, for which `condition` holds."""
    call = stub.WatchStatus(pb.WatchStatusRequest())
    try:
        async for response in call:
            if condition(response.status):
                return response.status
    finally:
        call.cancel()
    raise AssertionError("the status stream ended")


def prompt_of(prompt: str | Sequence[int] | Sequence[tuple[str, str]]) -> pb.Prompt:
    """Text, token ids, or (role, content) pairs."""
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    if isinstance(prompt[0], int):
        return pb.Prompt(token_ids=pb.TokenIds(ids=prompt))
    return pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for role, text in prompt]))


def request(prompt, **options) -> pb.GenerateRequest:
    """A GenerateRequest; sampling fields may be given directly."""
    names = {field.name for field in pb.Sampling.DESCRIPTOR.fields}
    sampling = pb.Sampling(**{name: options.pop(name) for name in list(options) if name in names})
    return pb.GenerateRequest(prompt=prompt_of(prompt), sampling=sampling, **options)


async def collect(call) -> Answer:
    """Read a Generate stream to its end."""
    text, token_ids, finished = [], [], None
    async for response in call:
        assert finished is None, "something came after the last message"
        if response.WhichOneof("event") == "delta":
            text.append(response.delta.text)
            token_ids += response.delta.token_ids
        else:
            finished = response.finished
    assert finished is not None, "the stream ended without its last message"
    return Answer("".join(text), token_ids, finished)
