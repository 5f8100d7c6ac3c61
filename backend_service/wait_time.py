"""How long until there is room in a line that is full."""

from __future__ import annotations

from backend_service.places import Shortage
from backend_service.request import RequestView
from backend_service.scheduler import Snapshot
from backend_service.step_model import IsolatedRates
from service_kit.faults import Overloaded
from service_kit.step_time import StepShape

LEAST_S = 0.1


def full(snapshot: Snapshot, rates: IsolatedRates, shortage: Shortage) -> Overloaded:
    """What a request is told for which there is no room."""
    taken = f"{len(snapshot.requests)} requests are here" if shortage.requests else "Too many tokens wait here"
    return Overloaded(
        f"{taken} and no more are taken; retry later or use another backend.",
        retry_after_s=seconds_until_room(snapshot, rates, requests=shortage.requests, tokens=shortage.tokens),
    )


def seconds_until_room(snapshot: Snapshot, rates: IsolatedRates, *, requests: int, tokens: int) -> float:
    """Until so many of the waiting requests, with so many prompt tokens and decode budgets, are admitted.

    An estimate: the first follows the request that has least to do, and each further one when the engine has done the
    work of the one before it, in a batch as large as there are requests. Answers count as long as they may become.
    """
    rows = max(1, min(snapshot.max_active, len(snapshot.requests)))
    step_s = _decode_step_s(snapshot, rates, rows)
    prefill_s = 1 / rates.prefill_tokens_per_s
    elapsed_s = min(
        (view.remaining_prefill_tokens * prefill_s + view.remaining_decode_tokens * step_s for view in snapshot.active),
        default=0.0,
    )
    for view in snapshot.waiting:
        requests -= 1
        tokens -= _size(view)
        if requests <= 0 and tokens <= 0:
            break
        elapsed_s += view.remaining_prefill_tokens * prefill_s + view.remaining_decode_tokens * step_s / rows
    return max(LEAST_S, elapsed_s)


def _decode_step_s(snapshot: Snapshot, rates: IsolatedRates, rows: int) -> float:
    if snapshot.step_model is None:
        return rows / rates.decode_tokens_per_s  # as if a batch gained nothing
    contexts = [view.context_tokens for view in snapshot.active]
    attended = rows * (sum(contexts) / len(contexts) if contexts else 0.0)
    return snapshot.step_model.seconds(StepShape(rows, rows, attended))


def _size(view: RequestView) -> int:
    return view.prompt_tokens + view.generated_tokens + view.remaining_decode_tokens
