"""A backend's Status taken off the wire: summed once, then a frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phaseroute.v1 import inference_pb2 as pb
from router_service.decision import Rates

_ACTIVE = (pb.REQUEST_PHASE_PREFILL, pb.REQUEST_PHASE_DECODE)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one Status says, as far as routing needs it."""

    incarnation: str
    sequence: int
    model: str
    fingerprint: str
    """Of the weights' origin."""
    tokenizer_fingerprint: str
    """Equal for equal token ids; empty: not told."""
    precision: str
    """How the weights are held; empty: not told."""
    context_tokens: int
    max_active: int
    active: int
    queued: int
    waiting_prefill_tokens: int
    waiting_decode_tokens: int
    attempt_ids: frozenset[str]
    """Of the requests that a router sent."""
    rates: Rates | None
    draining: bool
    wire: pb.BackendStatus
    """The message itself, for showing it on; never changed."""

    @classmethod
    def of(cls, status: pb.BackendStatus) -> Snapshot:
        """Sum up a Status."""
        active = sum(request.phase in _ACTIVE for request in status.requests)
        return cls(
            incarnation=status.incarnation,
            sequence=status.sequence,
            model=status.model.name,
            fingerprint=status.model.fingerprint,
            tokenizer_fingerprint=status.model.tokenizer_fingerprint,
            precision=status.model.precision,
            context_tokens=status.model.context_tokens,
            max_active=status.max_active,
            active=active,
            queued=len(status.requests) - active,
            waiting_prefill_tokens=sum(request.remaining_prefill_tokens for request in status.requests),
            waiting_decode_tokens=sum(request.remaining_decode_tokens for request in status.requests),
            attempt_ids=frozenset(request.attempt_id for request in status.requests if request.attempt_id),
            rates=_rates(status.isolated_rates) if status.HasField("isolated_rates") else None,
            draining=status.draining,
            wire=status,
        )

    def older_than(self, other: Snapshot) -> bool:
        """Sequences compare only within one incarnation."""
        return self.incarnation == other.incarnation and self.sequence < other.sequence


def _rates(wire: pb.IsolatedRates) -> Rates | None:
    """None unless both are usable as divisors."""
    rates = (wire.prefill_tokens_per_s, wire.decode_tokens_per_s)
    if all(math.isfinite(rate) and rate > 0 for rate in rates):
        return Rates(*rates)
    return None
