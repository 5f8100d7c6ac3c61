"""Policies by name."""

from __future__ import annotations

from backend_service.scheduling.base import QueuePolicy
from backend_service.scheduling.fair import Fair
from backend_service.scheduling.fcfs import FirstComeFirstServed
from backend_service.scheduling.priority import DEFAULT_PROMOTE_AFTER_S, InteractiveFirst
from backend_service.scheduling.shortest_prefill_first import ShortestPrefillFirst
from service_kit.faults import StartupFailed

POLICY_NAMES = (Fair.name, FirstComeFirstServed.name, ShortestPrefillFirst.name, InteractiveFirst.name)


def make_policy(
    name: str,
    *,
    prefill_tokens_per_s: float,
    decode_tokens_per_s: float | None = None,
    promote_after_s: float = DEFAULT_PROMOTE_AFTER_S,
) -> QueuePolicy:
    """A policy for an engine that serves one request alone at these rates; without one for decode, a token costs what
    a prompt token does. Raises `StartupFailed` that lists what there is."""
    match name:
        case Fair.name:
            return Fair(prefill_tokens_per_s, decode_tokens_per_s or prefill_tokens_per_s)
        case FirstComeFirstServed.name:
            return FirstComeFirstServed()
        case ShortestPrefillFirst.name:
            return ShortestPrefillFirst(prefill_tokens_per_s)
        case InteractiveFirst.name:
            return InteractiveFirst(promote_after_s)
    raise StartupFailed(f'"{name}" is no scheduling policy; use one of {", ".join(POLICY_NAMES)}.')
