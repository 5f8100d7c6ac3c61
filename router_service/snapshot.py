"""A backend's Status taken off the wire: checked and summed once, then a frozen value.

A Status may be nonsense: numbers that are none, rates that nobody has, a million requests. What makes no sense counts
as not told; a Status that cannot be believed at all is a `BadStatus`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from phaseroute.v1 import inference_pb2 as pb
from router_service.decision import Rates
from service_kit.step_time import StepModel, StepShape

MAX_REQUESTS = 20_000
"""More than any backend's queue may hold."""
FASTEST_STEP_S = 1e-6
"""No engine takes less for a token."""
SLOWEST_STEP_S = 3600.0
UNKNOWN_KV_TOKENS = 1 << 40
"""Of a backend that does not tell: room for anything."""

MOST_TOKENS = 1 << 30
"""Of any one count; larger ones are taken for this."""

_ACTIVE = (pb.REQUEST_PHASE_PREFILL, pb.REQUEST_PHASE_DECODE)


class BadStatus(Exception):
    """It cannot be believed; the message says why, for people."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How one request stands there."""

    attempt_id: str
    """Empty for one that no router sent."""
    active: bool
    prefill_tokens: int
    budget_tokens: int
    """max_new_tokens less what was generated."""
    generated_tokens: int
    context_tokens: int
    prompt_tokens: int
    kv_tokens: int
    """At worst, beyond what it shares; with padded batches all of it."""
    workload: str
    ignore_eos: bool
    batch: bool
    due_in_s: float
    """From the moment of the Status; for those that wait."""
    client: str
    """Whose it is; empty where nobody says."""


@dataclass(frozen=True, slots=True)
class Pace:
    """By what rules and how fast a backend computes: what a forecast needs beside its requests."""

    model: StepModel
    step_tokens: int
    step_target_s: float | None
    model_age_s: float
    """Since the newest step that the model was fitted to, at the moment of the Status."""


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
    standing: tuple[Standing, ...]
    """Every request: the active ones, then the others in order of admission."""
    rates: Rates | None
    pace: Pace | None
    """None without a usable step model."""
    free_kv_tokens: int
    """Neither held by an active request nor set aside for its worst case. With padded batches: all there is."""
    padded_kv: bool
    running_s: float
    """Since the last step ended, at the moment of the Status: so long has the present one been running."""
    order: str
    """Of admission: the scheduling policy's name."""
    promote_batch_after_s: float
    draining: bool
    wire: pb.BackendStatus
    """The message itself, for showing it on; never changed."""

    @classmethod
    def of(cls, status: pb.BackendStatus) -> Snapshot:
        """Sum up a Status. Raises `BadStatus`."""
        if len(status.requests) > MAX_REQUESTS:
            raise BadStatus(
                f"its Status lists {len(status.requests)} requests; nobody queues more than {MAX_REQUESTS}: restart it"
            )
        padded = status.kv_cache.padded
        standing = tuple(_standing(request, padded=padded) for request in status.requests)
        standing = tuple(sorted(standing, key=lambda request: not request.active))
        active = sum(request.active for request in standing)
        return cls(
            incarnation=status.incarnation,
            sequence=status.sequence,
            model=status.model.name,
            fingerprint=status.model.fingerprint,
            tokenizer_fingerprint=status.model.tokenizer_fingerprint,
            precision=status.model.precision,
            context_tokens=status.model.context_tokens,
            max_active=max(1, status.max_active),
            active=active,
            queued=len(standing) - active,
            waiting_prefill_tokens=sum(request.prefill_tokens for request in standing),
            waiting_decode_tokens=sum(request.budget_tokens for request in standing),
            attempt_ids=frozenset(request.attempt_id for request in standing if request.attempt_id),
            standing=standing,
            rates=_rates(status.isolated_rates) if status.HasField("isolated_rates") else None,
            pace=_pace(status),
            free_kv_tokens=_free_kv(status.kv_cache),
            padded_kv=padded,
            running_s=_seconds(status.seconds_since_progress),
            order=status.scheduling_policy,
            promote_batch_after_s=_seconds(status.step_rules.promote_batch_after_s),
            draining=status.draining,
            wire=status,
        )

    def answers(self, attempt_id: str) -> bool:
        """That attempt is past its prompt."""
        found = next((request for request in self.standing if request.attempt_id == attempt_id), None)
        return found is not None and found.active and found.generated_tokens > 0 and not found.prefill_tokens

    def older_than(self, other: Snapshot) -> bool:
        """Sequences compare only within one incarnation."""
        return self.incarnation == other.incarnation and self.sequence < other.sequence


def _standing(wire: pb.RequestStatus, *, padded: bool) -> Standing:
    active = wire.phase in _ACTIVE
    if active:
        prompt = wire.prompt_tokens or wire.context_tokens + wire.remaining_prefill_tokens - wire.generated_tokens
        worst = max(0, prompt) + wire.generated_tokens + wire.remaining_decode_tokens
        kv_tokens = worst if padded else max(0, worst - wire.cached_tokens)
    else:
        prompt = max(wire.prompt_tokens, wire.remaining_prefill_tokens) if padded else wire.remaining_prefill_tokens
        kv_tokens = prompt + wire.remaining_decode_tokens
    decoding = wire.phase == pb.REQUEST_PHASE_DECODE
    return Standing(
        attempt_id=wire.attempt_id,
        active=active,
        prefill_tokens=0 if decoding else min(wire.remaining_prefill_tokens, MOST_TOKENS),
        budget_tokens=min(wire.remaining_decode_tokens, MOST_TOKENS),
        generated_tokens=min(wire.generated_tokens, MOST_TOKENS),
        context_tokens=min(
            wire.context_tokens if active else max(0, wire.prompt_tokens - wire.remaining_prefill_tokens), MOST_TOKENS
        ),
        prompt_tokens=min(wire.prompt_tokens, MOST_TOKENS),
        kv_tokens=min(kv_tokens, MOST_TOKENS),
        workload=wire.workload,
        ignore_eos=wire.ignore_eos,
        batch=wire.priority == pb.PRIORITY_BATCH,
        due_in_s=wire.due_in_s if math.isfinite(wire.due_in_s) else 0.0,
        client=wire.client,
    )


def _rates(wire: pb.IsolatedRates) -> Rates | None:
    """None unless both are rates that an engine can have."""
    rates = (wire.prefill_tokens_per_s, wire.decode_tokens_per_s)
    if all(1 / SLOWEST_STEP_S <= rate <= 1 / FASTEST_STEP_S for rate in rates):
        return Rates(*rates)
    return None


def _pace(status: pb.BackendStatus) -> Pace | None:
    """None where no step model is told, or one that no engine can have."""
    if not status.HasField("step_model"):
        return None
    wire, rules = status.step_model, status.step_rules
    knots = tuple((correction.rows, correction.seconds) for correction in wire.row_corrections)
    coefficients = (wire.base_s, wire.per_token_s, wire.per_row_s, wire.per_attended_s)
    if not all(math.isfinite(value) and 0 <= value <= SLOWEST_STEP_S for value in coefficients):
        return None
    if not all(math.isfinite(seconds) for _, seconds in knots) or any(a >= b for (a, _), (b, _) in pairwise(knots)):
        return None
    model = StepModel(*coefficients, samples=wire.samples, residual_p90_s=wire.residual_p90_s, row_corrections_s=knots)
    batches = {1, max(1, min(status.max_active, 64)), *(rows for rows, _ in knots if rows)}
    if not all(FASTEST_STEP_S <= model.seconds(StepShape(rows, rows, rows)) <= SLOWEST_STEP_S for rows in batches):
        return None
    target_s = rules.step_target_s if rules.HasField("step_target_s") else math.inf
    return Pace(
        model=model,
        step_tokens=rules.step_tokens or 1 << 20,
        step_target_s=target_s if math.isfinite(target_s) and target_s > 0 else None,
        model_age_s=_seconds(wire.age_s),
    )


def _free_kv(wire: pb.KvCacheStatus) -> int:
    if not wire.capacity_tokens:
        return UNKNOWN_KV_TOKENS
    if wire.padded:
        return wire.capacity_tokens
    return max(0, wire.capacity_tokens - max(0, wire.used_tokens - wire.retained_tokens) - wire.reserved_tokens)


def _seconds(value: float) -> float:
    """A duration; 0 where it is none."""
    return value if math.isfinite(value) and value > 0 else 0.0
