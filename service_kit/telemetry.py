"""OpenTelemetry traces by hand-made spans, exported only when the standard OTEL_* variables ask for it.

Names follow the RPC and GenAI semantic conventions; what they do not have is under `phaseroute.`. The conventions'
own Python constants change between releases, so the few that are used are written out in `Attr`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import grpc
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.util.types import Attributes

from service_kit.faults import StartupFailed

FLUSH_S = 1.5
"""At shutdown, for spans still waiting to be exported."""
ABANDON_S = 0.5
"""Then, for a blocked export to notice that it was given up. Both together bound the shutdown at 2 s."""


class Attr:
    """Attribute names; docs/telemetry.md says where each is found."""

    RPC_SYSTEM: Final = "rpc.system.name"
    RPC_METHOD: Final = "rpc.method"
    RPC_STATUS: Final = "rpc.response.status_code"
    ERROR_TYPE: Final = "error.type"
    SERVER_ADDRESS: Final = "server.address"
    SERVER_PORT: Final = "server.port"

    RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
    INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
    CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

    WORKLOAD: Final = "phaseroute.workload"
    BACKEND: Final = "phaseroute.backend"
    ATTEMPT: Final = "phaseroute.attempt"
    ATTEMPT_ID: Final = "phaseroute.attempt.id"
    PROBE_OUTCOME: Final = "phaseroute.probe.outcome"
    DECISION_ID: Final = "phaseroute.decision.id"
    DECISION_POLICY: Final = "phaseroute.decision.policy"
    DECISION_SELECTED: Final = "phaseroute.decision.selected"
    DECISION_REASON: Final = "phaseroute.decision.reason"
    # Parallel arrays: element i of each belongs to the same candidate.
    CANDIDATE_NAMES: Final = "phaseroute.candidates.names"
    CANDIDATE_SCORES_S: Final = "phaseroute.candidates.scores_s"
    CANDIDATE_PREDICTED_FINISH_S: Final = "phaseroute.candidates.predicted_finish_s"
    CANDIDATE_PRICED_BY: Final = "phaseroute.candidates.priced_by"
    CANDIDATE_PREFILL_TOKENS: Final = "phaseroute.candidates.prefill_tokens"
    CANDIDATE_DECODE_TOKENS: Final = "phaseroute.candidates.decode_tokens"
    CANDIDATE_REUSABLE_TOKENS: Final = "phaseroute.candidates.reusable_tokens"
    CANDIDATE_ACTIVE: Final = "phaseroute.candidates.active"
    CANDIDATE_QUEUED: Final = "phaseroute.candidates.queued"
    CANDIDATE_PROBE_OUTCOMES: Final = "phaseroute.candidates.probe_outcomes"


_SERVER_ERRORS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"},
)
"""The codes that are a server's own failure (RPC semantic conventions, gRPC); the others are the client's."""


@dataclass(slots=True)
class RpcSpan:
    """The span of one call."""

    span: Span
    code: str = ""
    """A gRPC status code's name. Left empty, it follows from how the block ends: OK, a raised `AioRpcError`'s code,
    CANCELLED, or UNKNOWN for any other exception."""
    metadata: tuple[tuple[str, str], ...] = ()
    """On a client span: what to send along, so that the other side's span becomes a child of this one."""


class Telemetry:
    """Makes spans. Without a provider they cost next to nothing, and a caller's trace context is still passed on."""

    def __init__(self, provider: TracerProvider | None = None, exporters: Iterable[SpanExporter] = ()) -> None:
        self._provider = provider
        self._exporters = tuple(exporters)
        self._tracer = provider.get_tracer("phaseroute") if provider else trace.NoOpTracer()

    @classmethod
    def from_environment(cls, service_name: str) -> Telemetry:
        """Export as the standard variables say; a name in OTEL_SERVICE_NAME wins over `service_name`.

        Reads OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER (otlp, console, none) and the protocol variables; the SDK reads
        the others, such as endpoints, headers and sampler. Raises `StartupFailed` for what cannot be done.
        """
        exporters = [_exporter(name) for name in _exporter_names()]
        if not exporters:
            return cls()
        own = Resource({"service.name": service_name, "service.version": version("phaseroute")})
        resource = Resource.create(own.merge(OTELResourceDetector().detect()).attributes)
        # At exit the SDK would wait for a dead collector without bound; `shutdown` is called instead.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for exporter in exporters:
            provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, exporters)

    @contextmanager
    def server_span(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Iterator[RpcSpan]:
        """The span of a call received; child of the caller's span if its metadata names one.

        `method` is `package.Service/Method`. Current inside the block, as is the caller's baggage.
        """
        carrier: dict[str, list[str]] = {}
        for key, value in metadata or ():
            if isinstance(value, str):
                carrier.setdefault(key, []).append(value)
        token = otel_context.attach(propagate.extract(carrier))
        try:
            with self._rpc_span(method, SpanKind.SERVER) as call:
                yield call
        finally:
            otel_context.detach(token)

    @contextmanager
    def client_span(self, method: str, target: str, attributes: Attributes = None) -> Iterator[RpcSpan]:
        """The span of a call made to a gRPC target. Send its `metadata` with the call."""
        with self._rpc_span(method, SpanKind.CLIENT, {**_address(target), **(attributes or {})}) as call:
            outgoing: dict[str, str] = {}
            propagate.inject(outgoing)
            call.metadata = tuple(outgoing.items())
            yield call

    def span(self, name: str, attributes: Attributes = None) -> AbstractContextManager[Span]:
        """An internal span around a block; child of the current one."""
        return self._tracer.start_as_current_span(name, attributes=attributes, record_exception=False)

    def past_span(self, name: str, start_s: float, end_s: float, attributes: Attributes = None) -> None:
        """A child of the current span for something that is over; times on the `time.monotonic` clock."""
        to_unix_s = time.time() - time.monotonic()
        span = self._tracer.start_span(name, attributes=attributes, start_time=_ns(start_s + to_unix_s))
        span.end(_ns(end_s + to_unix_s))

    async def shutdown(self) -> bool:
        """Export what is waiting; False if that took too long and spans were lost. Takes FLUSH_S + ABANDON_S at most,
        whatever the collector does."""
        if self._provider is None:
            return True
        return await asyncio.to_thread(self._shutdown, self._provider)

    def _shutdown(self, provider: TracerProvider) -> bool:
        # Daemon: should an exporter not give up even now, the process ends without it.
        flusher = threading.Thread(target=provider.shutdown, name="telemetry-shutdown", daemon=True)
        flusher.start()
        flusher.join(FLUSH_S)
        if not flusher.is_alive():
            return True
        for exporter in self._exporters:
            exporter.shutdown()
        flusher.join(ABANDON_S)
        return False

    @contextmanager
    def _rpc_span(self, method: str, kind: SpanKind, attributes: Attributes = None) -> Iterator[RpcSpan]:
        with self._tracer.start_as_current_span(
            method,
            kind=kind,
            attributes={Attr.RPC_SYSTEM: "grpc", Attr.RPC_METHOD: method, **(attributes or {})},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            call = RpcSpan(span)
            ending = "UNKNOWN"
            try:
                yield call
                ending = "OK"
            except grpc.aio.AioRpcError as error:
                ending = error.code().name
                raise
            except (asyncio.CancelledError, GeneratorExit):
                ending = "CANCELLED"
                raise
            finally:
                call.code = call.code or ending
                _end(call, kind)


def _end(call: RpcSpan, kind: SpanKind) -> None:
    call.span.set_attribute(Attr.RPC_STATUS, call.code)
    if call.code in _SERVER_ERRORS or (kind is SpanKind.CLIENT and call.code != "OK"):
        call.span.set_attribute(Attr.ERROR_TYPE, call.code)
        call.span.set_status(StatusCode.ERROR)


def _address(target: str) -> dict[str, str | int]:
    host, colon, port = target.removeprefix("dns:///").rpartition(":")
    if colon and port.isdecimal() and not target.startswith("unix"):
        return {Attr.SERVER_ADDRESS: host, Attr.SERVER_PORT: int(port)}
    return {Attr.SERVER_ADDRESS: target}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _exporter_names() -> list[str]:
    if _variable("OTEL_SDK_DISABLED").lower() == "true":
        return []
    chosen = _variable("OTEL_TRACES_EXPORTER").lower()
    if not chosen:
        has_endpoint = _variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or _variable("OTEL_EXPORTER_OTLP_ENDPOINT")
        chosen = "otlp" if has_endpoint else "none"
    return [name for name in (part.strip() for part in chosen.split(",")) if name and name != "none"]


def _exporter(name: str) -> SpanExporter:
    match name:
        case "console":
            return ConsoleSpanExporter(out=sys.stderr)
        case "otlp":
            return _otlp_exporter()
        case _:
            raise StartupFailed(f'OTEL_TRACES_EXPORTER names "{name}"; use otlp, console or none.')


def _otlp_exporter() -> SpanExporter:
    # Imported only when wanted: it would double the time this module takes to import.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    protocol = _variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or _variable("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol != "grpc":
        raise StartupFailed(
            f'Traces cannot be exported over "{protocol}"; set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc with an '
            "endpoint on the collector's gRPC port (often 4317), or OTEL_TRACES_EXPORTER=none."
        )
    try:
        return OTLPSpanExporter()
    except (ValueError, OSError) as error:
        raise StartupFailed(f"The OTEL_EXPORTER_OTLP_* variables cannot be used ({error}); correct them.") from error


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()
