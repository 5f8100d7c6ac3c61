"""Short ways to write the router's values down in tests."""

from __future__ import annotations

import datetime
import random

from phaseroute.v1 import inference_pb2 as pb
from router_service.backend import Backend
from router_service.decision import Candidate, Choice, Decision, Rates, RoutingRequest
from router_service.snapshot import Snapshot

CPU = Rates(73, 45)
GPU = Rates(2551, 293)
"""The article's two devices."""


def rng(seed: int = 0) -> random.Random:
    return random.Random(seed)


def candidate(name: str, rates: Rates | None = GPU, **changes) -> Candidate:
    """Idle, with a cold prompt of 100 tokens."""
    values = {
        "active": 0,
        "queued": 0,
        "waiting_prefill_tokens": 0,
        "waiting_decode_tokens": 0,
        "prompt_tokens": 100,
        "max_active": 4,
        "context_tokens": 4096,
        **changes,
    }
    return Candidate(name=name, rates=rates, **values)


def status(*requests: tuple[str, int, int], incarnation: str = "first", sequence: int = 1, **changes):
    """A Status; each request is (attempt id, remaining prefill tokens, remaining decode tokens): with prefill left it
    is queued, else it decodes."""
    message = pb.BackendStatus(
        incarnation=incarnation,
        sequence=sequence,
        model=pb.ModelInfo(
            name=changes.pop("model", "m"),
            fingerprint=changes.pop("fingerprint", "f"),
            context_tokens=changes.pop("context_tokens", 4096),
            tokenizer_fingerprint=changes.pop("tokenizer", "t"),
            precision=changes.pop("precision", "q4_1"),
        ),
        max_active=4,
        isolated_rates=pb.IsolatedRates(prefill_tokens_per_s=2551, decode_tokens_per_s=293),
        **changes,
    )
    for attempt_id, prefill_tokens, decode_tokens in requests:
        message.requests.add(
            attempt_id=attempt_id,
            phase=pb.REQUEST_PHASE_QUEUED if prefill_tokens else pb.REQUEST_PHASE_DECODE,
            remaining_prefill_tokens=prefill_tokens,
            remaining_decode_tokens=decode_tokens,
        )
    return message


def backend(name: str, heard: pb.BackendStatus | None = None) -> Backend:
    made = Backend(name, f"{name}:1", stub=None)
    if heard is not None:
        made.hear(Snapshot.of(heard), now_s=0.0)
    return made


def fleet(**heard: pb.BackendStatus | None) -> dict[str, Backend]:
    return {name: backend(name, status) for name, status in heard.items()}


def decision(request: RoutingRequest, candidates: list[Candidate], choice: Choice, **changes) -> Decision:
    values = {
        "id": "d1",
        "time": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "policy": "two_phase",
        "exclusions": [],
        "probe_s": 0.002,
        "choose_s": 0.0001,
        "attempt": 1,
        **changes,
    }
    return Decision(request=request, candidates=candidates, choice=choice, **values)
