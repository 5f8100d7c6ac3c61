import asyncio
import os
import time
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from service_kit.faults import StartupFailed
from service_kit.telemetry import Attr, Telemetry

METHOD = "phaseroute.v1.InferenceService/Generate"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SERVER_ERRORS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
CODES = st.sampled_from([code.name for code in grpc.StatusCode])


class Recorded:
    """A Telemetry whose spans end up in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = Telemetry(provider)

    def spans(self) -> dict[str, trace.Span]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture(autouse=True)
def _no_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def test_one_trace_from_the_caller_through_a_router_to_a_backend(recorded: Recorded) -> None:
    telemetry = recorded.telemetry
    with telemetry.server_span("router", [("traceparent", TRACEPARENT), ("tracestate", "a=1"), ("x-bin", b"\x00")]):
        with telemetry.span("route", {Attr.CANDIDATE_NAMES: ["cpu", "gpu"]}):
            pass
        with telemetry.client_span("attempt", "10.0.0.7:50051") as attempt:
            outgoing = attempt.metadata
    with telemetry.server_span("backend", outgoing):
        telemetry.past_span("prefill", time.monotonic() - 2.0, time.monotonic() - 1.5)
    spans = recorded.spans()
    assert {format(span.context.trace_id, "032x") for span in spans.values()} == {TRACE_ID}
    parents = {name: format(span.parent.span_id, "016x") for name, span in spans.items()}
    ids = {name: format(span.context.span_id, "016x") for name, span in spans.items()}
    assert parents == {
        "router": PARENT_ID,
        "route": ids["router"],
        "attempt": ids["router"],
        "backend": ids["attempt"],
        "prefill": ids["backend"],
    }
    assert {name: span.kind for name, span in spans.items()} == {
        "router": SpanKind.SERVER,
        "route": SpanKind.INTERNAL,
        "attempt": SpanKind.CLIENT,
        "backend": SpanKind.SERVER,
        "prefill": SpanKind.INTERNAL,
    }
    assert spans["backend"].context.trace_state.get("a") == "1"
    assert spans["route"].attributes[Attr.CANDIDATE_NAMES] == ("cpu", "gpu")
    assert spans["attempt"].attributes[Attr.SERVER_ADDRESS] == "10.0.0.7"
    assert spans["attempt"].attributes[Attr.SERVER_PORT] == 50051


def test_a_past_span_has_the_length_it_is_given(recorded: Recorded) -> None:
    end_s = time.monotonic() - 100.0
    recorded.telemetry.past_span("decode", end_s - 2.5, end_s, {Attr.OUTPUT_TOKENS: 7})
    span = recorded.spans()["decode"]
    assert span.end_time - span.start_time == pytest.approx(2.5e9, abs=1e3)
    # The wall clock, not the monotonic one.
    assert time.time() - span.end_time / 1e9 == pytest.approx(100.0, abs=50.0)


def test_without_a_provider_context_and_baggage_still_pass_through() -> None:
    telemetry = Telemetry()
    incoming = [("traceparent", TRACEPARENT), ("baggage", "tenant=a")]
    with telemetry.server_span(METHOD, incoming) as span, telemetry.client_span(METHOD, "b:1") as attempt:
        assert baggage.get_baggage("tenant") == "a"
        assert not span.span.is_recording()
        assert dict(attempt.metadata) == dict(incoming)
    assert baggage.get_baggage("tenant") is None


@pytest.mark.parametrize("metadata", [None, [], [("traceparent", "nonsense")], [("traceparent", TRACEPARENT)] * 2])
def test_a_missing_or_broken_context_starts_a_trace(recorded: Recorded, metadata: list[tuple[str, str]] | None) -> None:
    with recorded.telemetry.server_span(METHOD, metadata):
        pass
    span = recorded.spans()[METHOD]
    assert span.attributes[Attr.RPC_SYSTEM] == "grpc"
    assert span.attributes[Attr.RPC_METHOD] == METHOD


@given(code=CODES)
def test_a_server_span_is_an_error_only_for_the_servers_own_failures(code: str) -> None:
    recorded = Recorded()
    with recorded.telemetry.server_span(METHOD, None) as call:
        call.code = code
    span = recorded.spans()[METHOD]
    assert span.attributes[Attr.RPC_STATUS] == code
    assert (span.status.status_code is StatusCode.ERROR) == (code in SERVER_ERRORS)
    assert (Attr.ERROR_TYPE in span.attributes) == (code in SERVER_ERRORS)


@given(code=CODES)
def test_a_client_span_is_an_error_for_everything_but_ok(code: str) -> None:
    recorded = Recorded()
    with recorded.telemetry.client_span(METHOD, "b:1") as call:
        call.code = code
    span = recorded.spans()[METHOD]
    assert span.attributes[Attr.RPC_STATUS] == code
    assert (span.status.status_code is StatusCode.ERROR) == (code != "OK")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata()), "NOT_FOUND"),
        (asyncio.CancelledError(), "CANCELLED"),
        (GeneratorExit(), "CANCELLED"),
        (KeyError("bug"), "UNKNOWN"),
        (None, "OK"),
    ],
)
def test_the_code_follows_from_how_the_block_ends(recorded: Recorded, error: BaseException | None, code: str) -> None:
    def block() -> None:
        with recorded.telemetry.client_span(METHOD, "b:1"):
            if error is not None:
                raise error

    if error is None:
        block()
    else:
        with pytest.raises(type(error)):
            block()
    span = recorded.spans()[METHOD]
    assert span.attributes[Attr.RPC_STATUS] == code
    # An exception's text may hold a prompt.
    assert span.events == ()
    assert not span.status.description


@pytest.mark.parametrize(
    ("target", "address", "port"),
    [
        ("gpu.local:50051", "gpu.local", 50051),
        ("dns:///gpu.local:50051", "gpu.local", 50051),
        ("[::1]:50051", "[::1]", 50051),
        ("unix:/run/b:1", "unix:/run/b:1", None),
        ("gpu.local", "gpu.local", None),
    ],
)
def test_a_target_becomes_address_and_port(recorded: Recorded, target: str, address: str, port: int | None) -> None:
    with recorded.telemetry.client_span(METHOD, target):
        pass
    attributes = recorded.spans()[METHOD].attributes
    assert (attributes[Attr.SERVER_ADDRESS], attributes.get(Attr.SERVER_PORT)) == (address, port)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "jaeger"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
    ],
)
def test_nothing_is_recorded_unless_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with Telemetry.from_environment("test").span("any") as span:
        assert not span.is_recording()


@pytest.mark.parametrize(
    ("variables", "fix"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "otlp, console or none"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "PROTOCOL=grpc"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "OTEL_EXPORTER_OTLP_"),
    ],
)
def test_a_wish_that_cannot_be_met_is_said(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], fix: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupFailed, match=fix):
        Telemetry.from_environment("test")


@pytest.mark.parametrize(
    ("variables", "name"),
    [({}, "router"), ({"OTEL_SERVICE_NAME": "mine"}, "mine"), ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=x"}, "x")],
)
async def test_the_environments_service_name_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], name: str
) -> None:
    for variable, value in {"OTEL_TRACES_EXPORTER": "console", **variables}.items():
        monkeypatch.setenv(variable, value)
    telemetry = Telemetry.from_environment("router")
    with telemetry.span("any"):
        pass
    assert await telemetry.shutdown()
    output = capsys.readouterr()
    assert f'"service.name": "{name}"' in output.err
    assert output.out == ""


def test_the_docs_list_every_attribute() -> None:
    page = (Path(__file__).parents[3] / "docs" / "telemetry.md").read_text()
    names = [value for name, value in vars(Attr).items() if name.isupper()]
    assert names
    assert [name for name in names if f"`{name}`" not in page] == []
