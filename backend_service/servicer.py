"""InferenceService of a backend: wire to scheduler and back, nothing else."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc

from backend_service.continuation import Complete, check_generated, resume
from backend_service.engines.base import EngineInfo
from backend_service.request import Ended, Failed, FinishReason, Progress, Request
from backend_service.runner import Runner
from backend_service.status import to_proto
from backend_service.text import TextStream
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit.faults import InvalidRequest, UnknownName
from service_kit.identity import Caller, Scope, current_caller
from service_kit.requests import GenerateSpec, Prompt, TokenPrompt, parse_generate, parse_prompt
from service_kit.telemetry import Attr, Telemetry

HEARTBEAT_S = 1.0
"""WatchStatus says something at least this often."""
PROGRESS_INTERVAL_S = 0.05
"""Least time between two messages that differ by generated tokens only."""

_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
}
_Context = grpc.aio.ServicerContext[Any, Any]


class BackendServicer(pb_grpc.InferenceServiceServicer):
    """Serves one runner; while that loads its engine, every call is refused as unavailable."""

    def __init__(self, runner: Runner, *, telemetry: Telemetry) -> None:
        self._runner = runner
        self._telemetry = telemetry
        self._incarnation = uuid.uuid4().hex
        # Its own: tokenizing a few long prompts must not use up the loop's default threads.
        self._tokenizers = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> AsyncIterator[pb.GenerateResponse]:
        """See the contract. A call that ends early, however it does, is cancelled in the scheduler."""
        arrived_s = time.monotonic()
        caller = current_caller()
        spec = _heeded(parse_generate(request), caller)
        if spec.model and spec.model != self._info.model_name:
            raise UnknownName(f'This backend serves "{self._info.model_name}", not "{spec.model}"; ask for that one.')
        tokens = await self._prepare(spec.prompt, caller.salt(spec.cache_salt))
        job = self._job(spec, tokens, caller, arrived_s)
        complete = resume(
            job.text, spec.generated, eos=job.eos, ignore_eos=spec.ignore_eos, max_new_tokens=spec.max_new_tokens
        )
        if complete is not None:
            if complete.text:
                yield pb.GenerateResponse(delta=pb.Delta(text=complete.text))
            yield pb.GenerateResponse(finished=_nothing_left(complete, job))
            return
        stream = self._runner.submit(job)
        try:
            while True:
                match await stream.get():
                    case Progress(_, text, token_ids):
                        yield pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=token_ids))
                    case Ended() as end:
                        self._trace(spec, end)
                        yield pb.GenerateResponse(finished=_finished(end))
                        return
                    case Failed(_, fault):
                        raise fault
        finally:
            self._runner.cancel(job.id, stream)

    async def Status(self, request: pb.StatusRequest, context: _Context) -> pb.StatusResponse:
        """See the contract."""
        return pb.StatusResponse(status=self._status(current_caller()))

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: _Context
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        """See the contract."""
        caller = current_caller()
        while True:
            told = self._runner.state
            yield pb.WatchStatusResponse(status=self._status(caller))
            sent_s = time.monotonic()
            while (now := self._runner.state).structure == told.structure:
                # News of progress waits for its interval, silence for the heartbeat; anything else ends the wait.
                wait_s = sent_s + (HEARTBEAT_S if now == told else PROGRESS_INTERVAL_S) - time.monotonic()
                if wait_s <= 0:
                    break
                await self._runner.changed(wait_s)

    async def CacheProbe(self, request: pb.CacheProbeRequest, context: _Context) -> pb.CacheProbeResponse:
        """See the contract."""
        salt = current_caller().salt(request.cache_salt)
        tokens = await self._prepare(parse_prompt(request.prompt), salt)
        return pb.CacheProbeResponse(prompt_tokens=len(tokens), reusable_tokens=self._runner.engine.probe(tokens, salt))

    @property
    def _info(self) -> EngineInfo:
        return self._runner.engine.info

    async def _prepare(self, prompt: Prompt, salt: str) -> Sequence[int]:
        engine = self._runner.engine
        if isinstance(prompt, TokenPrompt):
            if len(prompt.ids) > self._info.context_tokens:  # before each of them is looked at
                raise InvalidRequest(
                    "prompt.token_ids",
                    f"has {len(prompt.ids)} ids, more than the context of {self._info.context_tokens}; shorten it",
                )
            return engine.prepare(prompt, salt)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, engine.prepare, prompt, salt)

    def _job(self, spec: GenerateSpec, prompt: Sequence[int], caller: Caller, arrived_s: float) -> Request:
        context_tokens = self._info.context_tokens
        if len(prompt) + spec.max_new_tokens > context_tokens:
            raise InvalidRequest(
                "max_new_tokens",
                f"is {spec.max_new_tokens} after a prompt of {len(prompt)} tokens, more than the context of "
                f"{context_tokens}; shorten the prompt or ask for at most {max(0, context_tokens - len(prompt))}",
            )
        vocabulary = self._info.vocabulary
        check_generated(spec.generated, vocabulary)
        tokens = [*prompt, *spec.generated] if spec.generated else prompt
        salt = caller.salt(spec.cache_salt)
        reusable = spec.reusable_tokens
        if reusable is None:
            reusable = self._runner.engine.probe(tokens, salt)
        client = caller.client(spec.client)
        return Request(
            id=spec.attempt_id or uuid.uuid4().hex,
            tokens=tokens,
            max_new_tokens=spec.max_new_tokens,
            sampling=spec.sampling,
            ignore_eos=spec.ignore_eos,
            text=TextStream(vocabulary.pieces, spec.stop),
            eos=vocabulary.eos,
            reusable_estimate=min(reusable, len(tokens) - 1),
            submitted_s=arrived_s,
            priority=spec.priority,
            workload=spec.workload,
            resumed_tokens=len(spec.generated),
            client=client,
            weight=caller.share(spec.client_weight or (None if client == caller.name else 1.0)),
            cache_salt=salt,
        )

    def _status(self, caller: Caller) -> pb.BackendStatus:
        return to_proto(
            self._runner.snapshot,
            incarnation=self._incarnation,
            sequence=self._runner.state.sequence,
            info=self._info,
            rates=self._runner.rates,
            max_queued=self._runner.limits.max_queued,
            max_queued_tokens=self._runner.limits.max_queued_tokens or 0,
            draining=self._runner.draining,
            now_s=time.monotonic(),
            viewer=None if caller.scopes & {Scope.ROUTE, Scope.ADMIN} else caller.name,
        )

    def _trace(self, spec: GenerateSpec, end: Ended) -> None:
        times = end.times
        self._telemetry.past_span("queue", times.submitted_s, times.admitted_s)
        self._telemetry.past_span(
            "prefill",
            times.admitted_s,
            times.first_token_s,
            {Attr.INPUT_TOKENS: end.prompt_tokens, Attr.CACHED_TOKENS: end.cached_tokens},
        )
        self._telemetry.past_span(
            "decode",
            times.first_token_s,
            times.last_token_s,
            {
                Attr.OUTPUT_TOKENS: end.generated_tokens,
                Attr.RESPONSE_FINISH_REASONS: (end.reason.name.lower(),),
                Attr.ATTEMPT_ID: spec.attempt_id,
                Attr.WORKLOAD: spec.workload,
            },
        )


def _heeded(spec: GenerateSpec, caller: Caller) -> GenerateSpec:
    """What `Attempt` says counts only from those who may speak for others; `Caller` says so of client and salt."""
    if Scope.ROUTE in caller.scopes:
        return spec
    return replace(spec, attempt_id="", reusable_tokens=None, generated=())


def _nothing_left(complete: Complete, job: Request) -> pb.Finished:
    """The end of an answer of which only the end was lost; nothing was computed for it here."""
    return pb.Finished(
        finish_reason=_REASONS[complete.reason],
        usage=pb.Usage(prompt_tokens=job.prompt_tokens, generated_tokens=job.resumed_tokens),
        timings=pb.Timings(),
    )


def _finished(end: Ended) -> pb.Finished:
    times = end.times
    return pb.Finished(
        finish_reason=_REASONS[end.reason],
        usage=pb.Usage(
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            generated_tokens=end.generated_tokens,
        ),
        timings=pb.Timings(
            queue_s=times.admitted_s - times.submitted_s,
            prefill_s=times.first_token_s - times.admitted_s,
            decode_s=times.last_token_s - times.first_token_s,
        ),
    )
