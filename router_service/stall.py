"""Whether a backend makes progress, by its own Status."""

from __future__ import annotations

from router_service.snapshot import Snapshot
from service_kit.step_time import StepShape

STALL_S = 5.0
"""Granted to any step by default."""
SLOWDOWN = 3.0
"""A step may take so many times what the backend's own model or rates say: others may use the machine, too."""
LONGEST_STEP_S = 600.0
"""No step is granted more, and one of unknown speed is granted this."""


def why_stalled(snapshot: Snapshot, stall_s: float, *, status_age_s: float = 0.0) -> str:
    """Why a backend counts as hung, as a clause; empty when it does not.

    A step that computes nothing but decode rows ends within `stall_s`. One that computes prompts may take as long as
    all that is outstanding of them, or as one step may hold of it where the backend tells its bound. `status_age_s`:
    seconds since the Status came. O(1) unless something looks wrong.
    """
    silent_s = snapshot.running_s + status_age_s
    if silent_s <= stall_s or not snapshot.standing:
        return ""
    allowed_s = stall_s + longest_step_s(snapshot)
    if silent_s <= allowed_s:
        return ""
    requests = f"{snapshot.active} active and {snapshot.queued} waiting requests"
    return f"makes no progress: {requests}, and no step has ended for {silent_s:.0f} s; {allowed_s:.0f} s are granted"


def longest_step_s(snapshot: Snapshot) -> float:
    """What the step that runs there may take by itself, beyond what any step may take."""
    # A request that the Status shows as waiting may have been admitted since: Status is made between steps.
    taking_part = snapshot.standing[: max(snapshot.max_active, snapshot.active)]
    tokens = sum(request.prefill_tokens for request in taking_part)
    if not tokens:
        return 0.0
    pace = snapshot.pace
    if pace is not None:
        tokens = min(tokens, pace.step_tokens)
        rows = len(taking_part)
        # No token attends to more than the longest context there will be.
        context = max(request.context_tokens + request.prefill_tokens for request in taking_part)
        shape = StepShape(tokens + rows, rows, (tokens + rows) * context)
        return min(SLOWDOWN * pace.model.seconds(shape), LONGEST_STEP_S)
    if snapshot.rates is not None:
        return min(SLOWDOWN * tokens / snapshot.rates.prefill_tokens_per_s, LONGEST_STEP_S)
    return LONGEST_STEP_S
