"""The answers that an undisturbed backend gives."""

from __future__ import annotations

from dataclasses import dataclass

from backend_service.engines.base import Slice
from backend_service.engines.simulated import END_TOKEN, SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import PoolLimits
from phaseroute.v1 import inference_pb2 as pb
from service_kit.requests import GenerateSpec, Sampling, parse_generate
from tests.chaos.workload import PlannedRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client has when its stream has ended well."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: pb.FinishReason
    prompt_tokens: int


class Reference:
    """The simulated engine alone, in this process and in no time: its answers depend on the tokens before and on
    nothing else."""

    def __init__(self, context_tokens: int) -> None:
        speed = SimulatedSpeed(1.0, {1: 1.0})
        limits = PoolLimits(context_tokens, max_live=1, max_retained=0, retained_tokens=0)
        self._engine = SimulatedEngine(speed, limits, sleep=lambda _: None)

    def answer(self, planned: PlannedRequest) -> Answer:
        """What the request must get."""
        spec = parse_generate(planned.to_proto())
        tokens = self._engine.prepare(spec.prompt)
        admission = self._engine.admit(tokens, spec.max_new_tokens, Sampling(), ignore_eos=spec.ignore_eos)
        assert admission is not None, f"request {planned.index} does not fit the context"
        try:
            return self._run(spec, admission.handle, len(tokens))
        finally:
            self._engine.release(admission.handle, retain=False)

    def _run(self, spec: GenerateSpec, handle: int, prompt_tokens: int) -> Answer:
        pieces = self._engine.info.vocabulary.pieces
        answer: list[int] = []
        known, raw = prompt_tokens, b""
        while True:
            (token,) = self._engine.step([Slice(handle, known)]).tokens[handle]
            known = 1
            if token == END_TOKEN and not spec.ignore_eos:
                return Answer(tuple(answer), raw.decode(), pb.FINISH_REASON_EOS, prompt_tokens)
            answer.append(token)
            raw += pieces[token]
            text = raw.decode()
            found = min((at for string in spec.stop if (at := text.find(string)) >= 0), default=-1)
            if found >= 0:
                return Answer(tuple(answer), text[:found], pb.FINISH_REASON_STOP, prompt_tokens)
            if len(answer) == spec.max_new_tokens:
                return Answer(tuple(answer), text, pb.FINISH_REASON_LENGTH, prompt_tokens)
