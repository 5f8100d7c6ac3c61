"""What a simulated backend is: how fast, and by what rules; as set, or read off a live Status."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backend_service.engines.simulated import ModelSpeed, Speed
from backend_service.scheduling.fcfs import FirstComeFirstServed
from backend_service.scheduling.registry import POLICY_NAMES
from backend_service.step_model import IsolatedRates
from phaseroute.v1 import inference_pb2 as pb
from router_service.snapshot import BadStatus, Snapshot

MOST_ACTIVE = 4096
"""Of a batch."""
MOST_TOKENS = 1 << 30
"""Of a KV cache, and of a step."""


class BadProfile(ValueError):
    """No backend can be like that; the message says what is wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of backend. Raises `BadProfile` for values that no backend can have."""

    speed: Speed
    max_active: int = 4
    """The largest batch."""
    max_active_auto: bool = False
    """The batch size is chosen from the step model, up to max_active."""
    kv_tokens: int = 65_536
    step_tokens: int = 512
    """Computed in one step, decode rows included."""
    step_target_s: float | None = None
    """Longest time of a step with prefill in it; None: no bound."""
    scheduling: str = FirstComeFirstServed.name
    source: str = ""
    """Where its numbers come from, for people."""

    def __post_init__(self) -> None:
        for name, value, most in (
            ("max_active", self.max_active, MOST_ACTIVE),
            ("kv_tokens", self.kv_tokens, MOST_TOKENS),
            ("step_tokens", self.step_tokens, MOST_TOKENS),
        ):
            if not 1 <= value <= most:
                raise BadProfile(f"{name} is {value}; give 1 to {most}")
        if self.step_target_s is not None and not 0 < self.step_target_s < math.inf:
            raise BadProfile(f"step_target_s is {self.step_target_s}; give seconds above 0, or leave it out")
        if self.scheduling not in POLICY_NAMES:
            raise BadProfile(f"scheduling is {self.scheduling!r}; use one of {', '.join(POLICY_NAMES)}")


def profile_of_status(status: pb.BackendStatus) -> Profile:
    """A backend as its Status shows it, with the batch size that it has now even where it chooses that itself.

    Raises `BadProfile` for one that tells no isolated rates, no step model or no KV cache, or none that an engine can
    have.
    """
    try:
        snapshot = Snapshot.of(status)
    except BadStatus as error:
        raise BadProfile(str(error)) from error
    if snapshot.rates is None:
        raise BadProfile("its Status has no usable isolated rates; start it with --measure")
    if snapshot.pace is None:
        raise BadProfile("its Status has no usable step model yet; start it with --measure, or send it some requests")
    if not status.kv_cache.capacity_tokens:
        raise BadProfile("its Status does not tell the size of its KV cache; ask a backend, not a router before it")
    rates = IsolatedRates(snapshot.rates.prefill_tokens_per_s, snapshot.rates.decode_tokens_per_s)
    return Profile(
        ModelSpeed(snapshot.pace.model, rates),
        max_active=snapshot.max_active,
        kv_tokens=status.kv_cache.capacity_tokens,
        step_tokens=snapshot.pace.step_tokens,
        step_target_s=snapshot.pace.step_target_s,
        scheduling=snapshot.order or FirstComeFirstServed.name,
        source=f"Status of {status.engine.name} on {status.engine.device}, {status.model.name}",
    )
