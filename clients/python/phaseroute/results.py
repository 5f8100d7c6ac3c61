"""What comes back, as frozen values. Field for field the messages of `phaseroute/v1/inference.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from phaseroute.errors import PhaserouteError
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of an answer. Text may lag behind its token ids by an incomplete character or stop string."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    cached_tokens: int
    """The part of the prompt that was not computed again."""
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Measured on the backend, from the moment the request joined its queue."""

    queue_s: float
    prefill_s: float
    """From admission to the first token."""
    decode_s: float
    """From the first token to the last."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a router sent the request and how its forecast turned out; seconds since the request reached the router."""

    decision_id: str
    policy: str
    backend: str
    attempts: int
    predicted_ttft_s: float | None
    """None where the policy predicts nothing."""
    predicted_finish_s: float | None
    actual_ttft_s: float
    actual_finish_s: float
    predicted_new_tokens: float | None = None
    """What the forecast took the answer to come to."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a stream."""

    finish_reason: str
    """`eos`, `length` or `stop`."""
    usage: Usage
    timings: Timings
    routing: Routing | None
    """None when a backend was asked directly."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    routing: Routing | None


@dataclass(frozen=True, slots=True)
class Probe:
    """How much of a prompt is in the KV cache already."""

    prompt_tokens: int
    reusable_tokens: int


def event(response: pb.GenerateResponse) -> Delta | Finished | None:
    """One event of a stream; None for a kind that a newer server sends and this version does not know."""
    match response.WhichOneof("event"):
        case "delta":
            return Delta(response.delta.text, tuple(response.delta.token_ids))
        case "finished":
            return _finished(response.finished)
        case _:
            return None


def completion(events: Sequence[Delta | Finished]) -> Completion:
    """Everything a stream brought, in one value."""
    deltas = [item for item in events if isinstance(item, Delta)]
    last = events[-1] if events else None
    if not isinstance(last, Finished):
        raise PhaserouteError(
            grpc.StatusCode.INTERNAL, "The stream ended without its last message. The server's log says why; try again."
        )
    return Completion(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage,
        timings=last.timings,
        routing=last.routing,
    )


def decision_event(response: router_pb2.WatchDecisionsResponse) -> router_pb2.Decision | router_pb2.Outcome | None:
    """One event of WatchDecisions; None for a kind that this version does not know."""
    match response.WhichOneof("event"):
        case "decision":
            return response.decision
        case "outcome":
            return response.outcome
        case _:
            return None


def probe(response: pb.CacheProbeResponse) -> Probe:
    """The answer of CacheProbe."""
    return Probe(response.prompt_tokens, response.reusable_tokens)


def _finished(wire: pb.Finished) -> Finished:
    return Finished(
        finish_reason=_reason(wire.finish_reason),
        usage=Usage(wire.usage.prompt_tokens, wire.usage.cached_tokens, wire.usage.generated_tokens),
        timings=Timings(wire.timings.queue_s, wire.timings.prefill_s, wire.timings.decode_s),
        routing=_routing(wire.routing) if wire.HasField("routing") else None,
    )


def _reason(value: int) -> str:
    known = pb.FinishReason.DESCRIPTOR.values_by_number.get(value)
    return known.name.removeprefix("FINISH_REASON_").lower() if known else f"unknown ({value})"


def _routing(wire: pb.RoutingRecord) -> Routing:
    return Routing(
        decision_id=wire.decision_id,
        policy=wire.policy,
        backend=wire.backend,
        attempts=wire.attempts,
        predicted_ttft_s=wire.predicted_ttft_s if wire.HasField("predicted_ttft_s") else None,
        predicted_finish_s=wire.predicted_finish_s if wire.HasField("predicted_finish_s") else None,
        actual_ttft_s=wire.actual_ttft_s,
        actual_finish_s=wire.actual_finish_s,
        predicted_new_tokens=wire.predicted_new_tokens if wire.HasField("predicted_new_tokens") else None,
    )
