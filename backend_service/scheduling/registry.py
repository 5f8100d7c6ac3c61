"""Policies by name."""

from __future__ import annotations

from backend_service.scheduling.base import QueuePolicy
from backend_service.scheduling.fcfs import FirstComeFirstServed
from backend_service.scheduling.priority import DEFAULT_PROMOTE_AFTER_S, InteractiveFirst
from backend_service.scheduling.shortest_prefill_first import ShortestPrefillFirst
from service_kit.faults import StartupFailed

POLICY_NAMES = (FirstComeFirstServed.name, ShortestPrefillFirst.name, InteractiveFirst.name)


def make_policy(
    name: str, *, prefill_tokens_per_s: float, promote_after_s: float = DEFAULT_PROMOTE_AFTER_S
) -> QueuePolicy:
    """A policy for an engine that prefills one request alone at this rate. Raises `StartupFailed` that lists what
    there is."""
    match name:
        case FirstComeFirstServed.name:
            return FirstComeFirstServed()
        case ShortestPrefillFirst.name:
            return ShortestPrefillFirst(prefill_tokens_per_s)
        case InteractiveFirst.name:
            return InteractiveFirst(promote_after_s)
    raise StartupFailed(f'"{name}" is no scheduling policy; use one of {", ".join(POLICY_NAMES)}.')
