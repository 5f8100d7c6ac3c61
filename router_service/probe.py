"""Asks backends how much of a prompt they hold already: all at once, under one deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import grpc

from phaseroute.v1 import inference_pb2 as pb
from router_service.backend import Backend
from router_service.decision import Candidate, ProbeOutcome
from router_service.prompt_size import PromptSize
from service_kit.errors import UpstreamFailed, from_rpc_error
from service_kit.telemetry import Attr, Telemetry

METHOD = "phaseroute.v1.InferenceService/CacheProbe"


@dataclass(frozen=True, slots=True)
class Answer:
    """One backend's word on one prompt; 0 <= reusable_tokens < prompt_tokens."""

    prompt_tokens: int
    reusable_tokens: int


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What became of every question."""

    size: PromptSize
    outcomes: Mapping[str, ProbeOutcome]
    """By backend; one that is missing was not asked."""
    answers: Mapping[str, Answer]
    refusals: Mapping[str, UpstreamFailed]
    """Backends that say the request is wrong."""

    @property
    def counted_tokens(self) -> int | None:
        """The prompt's length as somebody counted it; None when it can only be guessed. Candidates tokenize alike, so
        one's count is good for the others."""
        if self.answers:
            return max(answer.prompt_tokens for answer in self.answers.values())
        return self.size.guess_tokens if self.size.exact else None

    def fill(self, candidate: Candidate) -> Candidate:
        """The candidate with what the probe told of it; without an answer no prefix is counted."""
        outcome = self.outcomes.get(candidate.name, ProbeOutcome.SKIPPED)
        answer = self.answers.get(candidate.name)
        if answer is not None:
            return replace(
                candidate,
                prompt_tokens=answer.prompt_tokens,
                prompt_tokens_estimated=False,
                reusable_tokens=answer.reusable_tokens,
                probe=outcome,
            )
        return replace(
            candidate,
            prompt_tokens=self.counted_tokens or self.size.guess_tokens,
            prompt_tokens_estimated=not self.size.exact,
            probe=outcome,
        )


async def probe(
    backends: Sequence[Backend],
    prompt: pb.Prompt,
    size: PromptSize,
    *,
    cache_salt: str = "",
    timeout_s: float,
    telemetry: Telemetry,
) -> ProbeReport:
    """Returns within `timeout_s`, whatever the backends do; no call outlives it. Only prefixes that were computed under
    `cache_salt` count."""
    request = pb.CacheProbeRequest(prompt=prompt, cache_salt=cache_salt)
    results = await asyncio.gather(*(_ask(backend, request, timeout_s, telemetry) for backend in backends))
    outcomes: dict[str, ProbeOutcome] = {}
    answers: dict[str, Answer] = {}
    refusals: dict[str, UpstreamFailed] = {}
    for backend, result in zip(backends, results, strict=True):
        if isinstance(result, Answer):
            outcomes[backend.name] = ProbeOutcome.ANSWERED
            answers[backend.name] = result
        else:
            outcomes[backend.name] = _outcome(result)
            if result.code is grpc.StatusCode.INVALID_ARGUMENT:
                refusals[backend.name] = result
    return ProbeReport(size, outcomes, answers, refusals)


async def _ask(
    backend: Backend, request: pb.CacheProbeRequest, timeout_s: float, telemetry: Telemetry
) -> Answer | UpstreamFailed:
    with telemetry.client_span(METHOD, backend.target, {Attr.BACKEND: backend.name}) as span:
        call = backend.stub.CacheProbe(request, timeout=timeout_s, metadata=span.metadata)
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            span.code = failure.code.name
            span.span.set_attribute(Attr.PROBE_OUTCOME, _outcome(failure).value)
            return failure
        finally:
            call.cancel()
        span.span.set_attribute(Attr.PROBE_OUTCOME, ProbeOutcome.ANSWERED.value)
        prompt_tokens = max(1, response.prompt_tokens)
        return Answer(prompt_tokens, min(response.reusable_tokens, prompt_tokens - 1))


def _outcome(failure: UpstreamFailed) -> ProbeOutcome:
    return ProbeOutcome.LATE if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED else ProbeOutcome.FAILED
