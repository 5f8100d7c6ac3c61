"""What clients say and are told stays out of logs, spans and errors, whatever happens."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import grpc
import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backend_service.host import host as backend_host
from backend_service.settings import BackendSettings
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2, router_pb2_grpc
from router_service.backend import State
from router_service.host import host as router_host
from router_service.settings import RouterSettings
from service_kit.channels import open_channel
from service_kit.logs import configure_logs
from service_kit.telemetry import Telemetry
from tests.integration.backends import FAST, collect, request

pytestmark = pytest.mark.timeout(60)

MARKER = "xyzzy-plugh"
IDS = [201, 202, 203, 204, 205, 206, 207, 208]
"""Token ids of the simulated engine's vocabulary, which is bytes; no number of a log is likely to be these in a row."""
CHAT = [("system", f"be {MARKER}"), ("user", MARKER)]


class Everything(io.StringIO):
    """All that was logged."""

    def isatty(self) -> bool:
        return False


@pytest.fixture(params=["json", "text"])
def logged(request: pytest.FixtureRequest) -> Iterator[Everything]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    stream = Everything()
    structlog.reset_defaults()
    configure_logs(request.param, "debug", stream)
    yield stream
    root.handlers, root.level = before, level
    structlog.reset_defaults()


class Spans:
    """All that was exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = Telemetry(provider)

    @property
    def text(self) -> str:
        return "".join(span.to_json() for span in self.exporter.get_finished_spans())


def traces(text: str, answers: list[str]) -> list[str]:
    """What of prompts and answers stands in a text."""
    wanted = [MARKER, *answers]
    wanted += [json.dumps(IDS), str(tuple(IDS)), " ".join(map(str, IDS))]
    wanted += [json.dumps(MARKER)[1:-1], MARKER.encode().hex(), repr(list(MARKER.encode()))]
    return [each for each in wanted if each in text]


async def ask(stub: pb_grpc.InferenceServiceStub, admin: router_pb2_grpc.RouterServiceStub) -> tuple[list[str], str]:
    """Say it in every way, good and bad; the answers, and all error texts."""
    said = [MARKER, CHAT, IDS, list(MARKER.encode())]
    done = [await collect(stub.Generate(request(prompt, max_new_tokens=12))) for prompt in said]
    answers = [each.text for each in done if len(each.text.strip()) > 6]
    errors = []

    async def fails(call: grpc.aio.Call) -> None:
        try:
            _ = [each async for each in call] if isinstance(call, grpc.aio.UnaryStreamCall) else await call
        except grpc.aio.AioRpcError as error:
            errors.append(f"{error.details()} {error.trailing_metadata()}")
        else:
            raise AssertionError("it was to fail")

    for bad in (
        request(MARKER, max_new_tokens=100_000),
        request(MARKER * 2000),
        request(MARKER, temperature=7.0),
        request(MARKER, stop=[MARKER * 100]),
        request(MARKER, stop=[MARKER, ""]),
        request(MARKER, model="nobody"),
        request([*IDS, 4_000_000]),
        request([("", MARKER)]),
        request(MARKER, attempt=pb.Attempt(id="a", generated_token_ids=[*IDS, 4_000_000])),
    ):
        await fails(stub.Generate(bad))
    await fails(stub.Generate(request(MARKER, max_new_tokens=4000), timeout=0.05))
    await fails(stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[*IDS, 4_000_000])))))
    await stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text=MARKER)))
    await admin.Route(router_pb2.RouteRequest(request=request(MARKER)))
    cancelled = stub.Generate(request(MARKER, max_new_tokens=4000, ignore_eos=True))
    await cancelled.read()
    cancelled.cancel()
    await stub.Status(pb.StatusRequest())
    return answers, "\n".join(errors)


async def test_nothing_of_it_is_written_down(logged: Everything) -> None:
    spans = Spans()
    settings = BackendSettings(listen="127.0.0.1:0", **FAST)
    async with backend_host(settings, spans.telemetry) as backend:
        routing = RouterSettings(
            listen="127.0.0.1:0", backend=[f"one={backend.server.target}"], probe_timeout_s=5.0, keep_lengths=False
        )
        async with (
            router_host(routing, spans.telemetry) as hosted,
            open_channel(hosted.server.target) as channel,
        ):
            with hosted.router.fleet.changes.subscribe() as changes:
                while hosted.router.fleet.backends["one"].state is not State.SERVING:
                    await changes.get()
            answers, errors = await ask(
                pb_grpc.InferenceServiceStub(channel), router_pb2_grpc.RouterServiceStub(channel)
            )
            # A bug's own text as well: this one repeats what it was asked.
            backend.runner.engine.prepare = broken
            await asyncio.gather(
                collect(pb_grpc.InferenceServiceStub(channel).Generate(request(MARKER))), return_exceptions=True
            )
            await hosted.server.drain()
        await backend.server.drain()
    logs = logged.getvalue()
    assert "decision" in logs
    assert "call failed" in logs
    assert "Generate" in spans.text
    assert answers
    assert errors
    assert traces(logs, answers) == []
    assert traces(spans.text, answers) == []
    assert traces(errors, answers) == []


def broken(prompt: object) -> list[int]:
    """With a cause that repeats it, too."""
    try:
        raise KeyError(prompt)
    except KeyError as error:
        raise ValueError(f"cannot read {prompt}") from error
