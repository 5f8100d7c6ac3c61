"""A backend's books as a forecast needs them: its last Status, what was booked since, and how long answers become."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from router_service.forecast import Job, Line, Load
from router_service.ledger import Lease
from router_service.lengths import LengthEstimator, LengthQuery
from router_service.snapshot import Snapshot, Standing
from router_service.worst_case import worst_case_tokens
from service_kit.requests import Priority

FAIR = "fair"
"""The order of admission under which a client's requests wait behind each other and not behind other clients'."""
MAX_RECKONED_S = 3.0
"""A Status older than this is reckoned on no further: a healthy backend speaks every second."""
_IN_FLIGHT_S = 1e-6
"""When a booking joins that the Status could have shown and did not: after the step that was running then."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What follows from one Status, until lengths are expected to be others."""

    snapshot: Snapshot
    lengths_version: int
    active: tuple[Job, ...]
    waiting: tuple[Job, ...]
    line: Line


class Loads:
    """Makes them; remembers the part that stays the same from one decision to the next."""

    def __init__(self, lengths: LengthEstimator, *, batch_weight: float = 1.0) -> None:
        """`batch_weight`: of the finish time of a request with priority batch; an interactive one weighs 1."""
        self.lengths = lengths
        self._batch_weight = batch_weight
        self._known: dict[str, _Known] = {}

    def weight(self, *, batch: bool) -> float:
        """Of a request's finish time in the sum."""
        return self._batch_weight if batch else 1.0

    def line(self, snapshot: Snapshot) -> Line:
        """How the backend orders those that wait, by its Status alone."""
        rate = snapshot.rates.prefill_tokens_per_s if snapshot.rates else 0.0
        if snapshot.order == FAIR:
            return Line(FAIR, virtual_s=snapshot.running_s, next_due_s=_next_due_s(snapshot))
        return Line(snapshot.order, snapshot.promote_batch_after_s, rate)

    def of(
        self, name: str, snapshot: Snapshot, bookings: Iterable[Lease], *, now_s: float, received_at_s: float
    ) -> Load | None:
        """The books now; None where no usable step model is known. Times on the router's clock."""
        pace = snapshot.pace
        if pace is None:
            return None
        start_s = received_at_s - snapshot.running_s
        known = self._standing(name, snapshot)
        active, waiting, line = known.active, known.waiting, known.line
        booked = []
        for lease in bookings:
            job = self._booked(lease, snapshot, line, lease.booked_s - start_s)
            booked.append(job)
            if line.order == FAIR:
                behind_s = job.due_s + _alone_s(snapshot, lease.prefill_tokens, lease.max_new_tokens)
                line = replace(line, next_due_s={**line.next_due_s, lease.client: behind_s})
        return Load(
            model=pace.model,
            max_active=snapshot.max_active,
            step_tokens=pace.step_tokens,
            step_target_s=pace.step_target_s,
            free_kv_tokens=snapshot.free_kv_tokens,
            padded_kv=snapshot.padded_kv,
            line=line,
            active=active,
            waiting=(*waiting, *booked),
            running_s=snapshot.running_s if active else 0.0,
            elapsed_s=snapshot.running_s + min(max(0.0, now_s - received_at_s), MAX_RECKONED_S),
        )

    def _standing(self, name: str, snapshot: Snapshot) -> _Known:
        known = self._known.get(name)
        if known is None or known.snapshot is not snapshot or known.lengths_version != self.lengths.version:
            jobs = tuple(self._job(item, snapshot.running_s) for item in snapshot.standing)
            active, waiting = jobs[: snapshot.active], jobs[snapshot.active :]
            known = _Known(snapshot, self.lengths.version, active, waiting, self.line(snapshot))
            self._known[name] = known
        return known

    def _job(self, item: Standing, running_s: float) -> Job:
        query = LengthQuery(
            item.workload,
            item.prompt_tokens,
            item.generated_tokens + item.budget_tokens,
            item.generated_tokens,
            item.ignore_eos,
        )
        return Job(
            prefill_tokens=item.prefill_tokens if item.active else max(1, item.prefill_tokens),
            decode_tokens=max(1, math.ceil(self.lengths.expected(query))) if item.budget_tokens > 0 else 1,
            context_tokens=item.context_tokens,
            kv_tokens=item.kv_tokens,
            weight=self.weight(batch=item.batch),
            due_s=running_s + item.due_in_s,
        )

    def _booked(self, lease: Lease, snapshot: Snapshot, line: Line, joined_s: float) -> Job:
        batch = lease.priority is Priority.BATCH
        joined_s = max(joined_s, _IN_FLIGHT_S)
        generated = lease.generated_tokens
        query = LengthQuery(
            lease.workload,
            lease.prompt_tokens - generated,
            lease.max_new_tokens + generated,
            generated,
            ignore_eos=lease.ignore_eos,
        )
        return Job(
            prefill_tokens=max(1, lease.prefill_tokens),
            decode_tokens=max(1, math.ceil(self.lengths.expected(query))),
            context_tokens=lease.reusable_tokens,
            kv_tokens=worst_case_tokens(
                lease.prompt_tokens, lease.reusable_tokens, lease.max_new_tokens, padded=snapshot.padded_kv
            ),
            weight=self.weight(batch=batch),
            joined_s=joined_s,
            due_s=line.due_s(joined_s, lease.prefill_tokens, batch=batch, client=lease.client),
        )


def _next_due_s(snapshot: Snapshot) -> dict[str, float]:
    """Of a fair order: where each client that has something waiting goes on. Weights are the backend's secret; here
    all are 1."""
    next_due_s: dict[str, float] = {}
    for item in snapshot.standing[snapshot.active :]:
        # In order of admission, so that a client's last is its latest.
        alone_s = _alone_s(snapshot, item.prefill_tokens, item.budget_tokens)
        next_due_s[item.client] = snapshot.running_s + item.due_in_s + alone_s
    return next_due_s


def _alone_s(snapshot: Snapshot, prefill_tokens: int, decode_tokens: int) -> float:
    """What a request costs its client: the seconds that it would take alone; 0 while rates are unknown."""
    if snapshot.rates is None:
        return 0.0
    return prefill_tokens / snapshot.rates.prefill_tokens_per_s + decode_tokens / snapshot.rates.decode_tokens_per_s
