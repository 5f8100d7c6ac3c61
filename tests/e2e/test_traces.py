"""One request's trace over three processes, at a real OTLP receiver."""

from __future__ import annotations

import pytest

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2_grpc
from service_kit.channels import open_channel
from service_kit.telemetry import Attr
from tests.e2e.processes import SIMULATED, serving, started, until_serving
from tests.integration.backends import collect, request
from tests.integration.collector import collecting

INFERENCE = "phaseroute.v1.InferenceService"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def value(item):
    kind = item.WhichOneof("value")
    return [value(one) for one in item.array_value.values] if kind == "array_value" else getattr(item, kind)


class Span:
    def __init__(self, wire, service):
        self.wire, self.name, self.service = wire, wire.name, service
        self.attributes = {item.key: value(item.value) for item in wire.attributes}
        self.seconds = (wire.end_time_unix_nano - wire.start_time_unix_nano) / 1e9


def spans_of(collector) -> list[Span]:
    return [
        Span(span, next(item.value.string_value for item in group.resource.attributes if item.key == "service.name"))
        for export in collector.requests
        for group in export.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
        if span.trace_id.hex() == TRACE_ID
    ]


@pytest.mark.timeout(60)
async def test_one_trace_from_the_client_to_the_backends_phases():
    async with collecting() as (collector, endpoint):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        slow = ("--simulated-decode-ms", "1:40")
        async with (
            started("backend_service", *SIMULATED, **environment) as fast,
            started("backend_service", *SIMULATED, *slow, **environment) as other,
        ):
            backends = ("--backend", f"fast={await serving(fast)}", "--backend", f"other={await serving(other)}")
            flags = (*backends, "--listen", "127.0.0.1:0", "--log-format", "json")
            async with (
                started("router_service", *flags, **environment) as router,
                open_channel(await serving(router)) as channel,
            ):
                await until_serving(router_pb2_grpc.RouterServiceStub(channel), 2)
                call = pb_grpc.InferenceServiceStub(channel).Generate(
                    request("Hello there", max_new_tokens=5, ignore_eos=True, workload="greeting"),
                    metadata=[("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")],
                )
                answer = await collect(call)
                for service in (router, fast, other):  # each flushes as it ends
                    assert await service.end() == 0
        spans = spans_of(collector)
    by_id = {span.wire.span_id: span for span in spans}

    def path(span: Span) -> list[tuple[str, str]]:
        parent = by_id.get(span.wire.parent_span_id)
        return [*(path(parent) if parent else []), (span.service, span.name)]

    paths = [path(span) for span in spans]
    generate = [("phaseroute-router", f"{INFERENCE}/Generate")]
    attempt = [*generate, ("phaseroute-router", f"{INFERENCE}/Generate")]
    at_backend = [*attempt, ("phaseroute-backend", f"{INFERENCE}/Generate")]
    for expected in (
        generate,
        [*generate, ("phaseroute-router", "route")],
        attempt,
        at_backend,
        *([*at_backend, ("phaseroute-backend", phase)] for phase in ("queue", "prefill", "decode")),
    ):
        assert paths.count(expected) == 1, (expected, paths)
    root = next(span for span in spans if path(span) == generate)
    assert root.wire.parent_span_id.hex() == PARENT_ID

    route = next(span for span in spans if span.name == "route").attributes
    assert route[Attr.DECISION_ID] == answer.finished.routing.decision_id
    assert route[Attr.DECISION_POLICY] == "predictive"
    assert route[Attr.DECISION_SELECTED] == "fast"
    assert "fast costs least" in route[Attr.DECISION_REASON]
    assert route[Attr.CANDIDATE_NAMES] == ["fast", "other"]
    assert route[Attr.CANDIDATE_SCORES_S][0] < route[Attr.CANDIDATE_SCORES_S][1]
    assert route[Attr.CANDIDATE_PREDICTED_FINISH_S][0] < route[Attr.CANDIDATE_PREDICTED_FINISH_S][1]
    assert route[Attr.CANDIDATE_PRICED_BY] == ["forecast", "forecast"]
    assert route[Attr.CANDIDATE_PREFILL_TOKENS] == [11, 11]
    assert route[Attr.CANDIDATE_DECODE_TOKENS] == [5, 5]
    assert route[Attr.WORKLOAD] == "greeting"

    phases = {span.name: span for span in spans if span.name in ("queue", "prefill", "decode")}
    assert phases["prefill"].attributes[Attr.INPUT_TOKENS] == 11
    assert phases["decode"].attributes[Attr.OUTPUT_TOKENS] == 5
    timings = answer.finished.timings
    assert phases["decode"].seconds == pytest.approx(timings.decode_s, abs=1e-3)
    assert phases["prefill"].seconds == pytest.approx(timings.prefill_s, abs=1e-3)
    assert answer.finished.finish_reason == pb.FINISH_REASON_LENGTH
