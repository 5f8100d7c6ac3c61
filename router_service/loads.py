"""A backend's books as a forecast needs them: its last Status, what was booked since, and how long answers become."""

from __future__ import annotations

import math
from collections.abc import Iterable

from router_service.forecast import Job, Line, Load
from router_service.ledger import Lease
from router_service.lengths import LengthEstimator, LengthQuery
from router_service.snapshot import Snapshot, Standing
from router_service.worst_case import worst_case_tokens
from service_kit.requests import Priority

MAX_RECKONED_S = 3.0
"""A Status older than this is reckoned on no further: a healthy backend speaks every second."""
_IN_FLIGHT_S = 1e-6
"""When a booking joins that the Status could have shown and did not: after the step that was running then."""


class Loads:
    """Makes them; remembers the part that stays the same from one decision to the next."""

    def __init__(self, lengths: LengthEstimator, *, batch_weight: float = 1.0) -> None:
        """`batch_weight`: of the finish time of a request with priority batch; an interactive one weighs 1."""
        self.lengths = lengths
        self._batch_weight = batch_weight
        self._known: dict[str, tuple[Snapshot, int, tuple[Job, ...], tuple[Job, ...]]] = {}

    def weight(self, *, batch: bool) -> float:
        """Of a request's finish time in the sum."""
        return self._batch_weight if batch else 1.0

    def line(self, snapshot: Snapshot) -> Line:
        """How the backend orders those that wait."""
        rate = snapshot.rates.prefill_tokens_per_s if snapshot.rates else 0.0
        return Line(snapshot.order, snapshot.promote_batch_after_s, rate)

    def of(
        self, name: str, snapshot: Snapshot, bookings: Iterable[Lease], *, now_s: float, received_at_s: float
    ) -> Load | None:
        """The books now; None where no usable step model is known. Times on the router's clock."""
        pace = snapshot.pace
        if pace is None:
            return None
        start_s = received_at_s - snapshot.running_s
        active, waiting = self._standing(name, snapshot)
        line = self.line(snapshot)
        booked = tuple(self._booked(lease, snapshot, line, lease.booked_s - start_s) for lease in bookings)
        return Load(
            model=pace.model,
            max_active=snapshot.max_active,
            step_tokens=pace.step_tokens,
            step_target_s=pace.step_target_s,
            free_kv_tokens=snapshot.free_kv_tokens,
            padded_kv=snapshot.padded_kv,
            line=line,
            active=active,
            waiting=waiting + booked,
            running_s=snapshot.running_s if active else 0.0,
            elapsed_s=snapshot.running_s + min(max(0.0, now_s - received_at_s), MAX_RECKONED_S),
        )

    def _standing(self, name: str, snapshot: Snapshot) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
        known = self._known.get(name)
        if known is None or known[0] is not snapshot or known[1] != self.lengths.version:
            jobs = tuple(self._job(item, snapshot.running_s) for item in snapshot.standing)
            active, waiting = jobs[: snapshot.active], jobs[snapshot.active :]
            known = self._known[name] = (snapshot, self.lengths.version, active, waiting)
        return known[2], known[3]

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
        query = LengthQuery(lease.workload, lease.prompt_tokens, lease.max_new_tokens, ignore_eos=lease.ignore_eos)
        return Job(
            prefill_tokens=max(1, lease.prefill_tokens),
            decode_tokens=max(1, math.ceil(self.lengths.expected(query))),
            context_tokens=lease.reusable_tokens,
            kv_tokens=worst_case_tokens(
                lease.prompt_tokens, lease.reusable_tokens, lease.max_new_tokens, padded=snapshot.padded_kv
            ),
            weight=self.weight(batch=batch),
            joined_s=joined_s,
            due_s=line.due_s(joined_s, lease.prefill_tokens, batch=batch),
        )
