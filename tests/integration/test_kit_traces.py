"""Spans of served calls, and collectors that do not collect."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phaseroute.v1 import inference_pb2 as pb
from service_kit.faults import EngineFailed
from service_kit.telemetry import Attr, Telemetry
from tests.integration.collector import collecting
from tests.integration.kit import (
    INFERENCE,
    PATIENCE_S,
    ask,
    cancelled_inside,
    collect,
    delta,
    failure,
    listening_but_dead,
    probe,
    serving,
)

pytestmark = pytest.mark.timeout(60)


async def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        now_s = time.monotonic()
        telemetry.past_span("prefill", now_s - 1.0, now_s, {Attr.CACHED_TOKENS: 496})
        yield delta("x")
        raise EngineFailed("The engine failed; send it again.")

    async with collecting() as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        telemetry = Telemetry.from_environment("backend")
        async with serving(telemetry=telemetry, Generate=generate) as running:
            parent = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
            await failure(collect(running.stub.Generate(ask(), metadata=[parent])))
            await running.stub.Status(pb.StatusRequest())
            await running.health.Check(health_pb2.HealthCheckRequest())
        # Leaving the server has flushed.
        [resource_spans] = [found for request in collector.requests for found in request.resource_spans]
    resource = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    assert resource["service.name"] == "backend"
    spans = {span.name: span for found in resource_spans.scope_spans for span in found.spans}
    assert set(spans) == {f"{INFERENCE}/Generate", "prefill"}
    server, prefill = spans[f"{INFERENCE}/Generate"], spans["prefill"]
    assert server.trace_id.hex() == prefill.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert server.parent_span_id.hex() == "b7ad6b7169203331"
    assert prefill.parent_span_id == server.span_id
    attributes = {item.key: item.value for item in server.attributes}
    assert attributes[Attr.RPC_METHOD].string_value == f"{INFERENCE}/Generate"
    assert attributes[Attr.RPC_STATUS].string_value == "INTERNAL"
    assert server.status.code == server.status.STATUS_CODE_ERROR
    assert prefill.end_time_unix_nano - prefill.start_time_unix_nano == pytest.approx(1e9, abs=1e3)


async def test_a_server_span_says_how_the_call_ended() -> None:
    entered = asyncio.Event()

    async def generate(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
        match request.prompt.text:
            case "hang":
                entered.set()
                await asyncio.Event().wait()
            case "abort":
                await context.abort(grpc.StatusCode.ABORTED, "")
            case "local cancel":
                await cancelled_inside()
        yield delta("x")

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serving(telemetry=Telemetry(provider), Generate=generate) as running:
        await collect(running.stub.Generate(ask("fine")))
        await failure(collect(running.stub.Generate(ask("abort"))))
        await failure(collect(running.stub.Generate(ask("local cancel"))))
        await failure(collect(running.channel.unary_stream(f"/{INFERENCE}/Generate")(b"\xff")))
        call = running.stub.Generate(ask("hang"))
        async with asyncio.timeout(PATIENCE_S):
            await entered.wait()
        call.cancel()
        await failure(collect(running.stub.Generate(ask("hang"), timeout=0.1)))
        await running.server.drain()
    ends = sorted(span.attributes[Attr.RPC_STATUS] for span in exporter.get_finished_spans())
    assert ends == ["ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "OK", "UNAVAILABLE"]


@pytest.mark.parametrize("kind", ["refuses", "never answers"])
async def test_a_dead_collector_costs_a_call_nothing_and_the_end_two_seconds(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening_but_dead() as dead:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{dead if kind != 'refuses' else '127.0.0.1:1'}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        telemetry = Telemetry.from_environment("backend")
        async with serving(telemetry=telemetry) as running:
            started_s = time.monotonic()
            for _ in range(20):
                await running.stub.CacheProbe(probe())
            # One export attempt alone would wait longer than that.
            assert time.monotonic() - started_s < 3.0
            started_s = time.monotonic()
            assert not await telemetry.shutdown()
            assert time.monotonic() - started_s < 3.0
            # Given up, not left behind: a thread inside of gRPC would trouble the end of the process.
            assert "telemetry-shutdown" not in {thread.name for thread in threading.enumerate()}
