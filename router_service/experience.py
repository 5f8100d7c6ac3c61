"""What earlier requests taught a router: how long answers become, at what pace requests come, and which backends had to
be measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from router_service.arrivals import Arrivals
from router_service.decision import Outlook, Price, RoutingRequest
from router_service.exploration import Exploration
from router_service.ledger import Lease
from router_service.lengths import LengthEstimator, LengthOutcome, LengthQuery, make_lengths
from router_service.loads import Loads
from router_service.policies.predictive import EXPLORATION, Objective
from router_service.snapshot import Snapshot


class Experience:
    """Grows with every request. Times are passed in; no clock of its own. Lengths may be kept in a file
    (`lengths.file`), the rest is lost with the process."""

    def __init__(self, lengths: LengthEstimator | None = None, objective: Objective | None = None) -> None:
        objective = objective or Objective()
        self.lengths = lengths or make_lengths("history")
        self.loads = Loads(self.lengths, batch_weight=objective.batch_weight)
        self._exploration = Exploration(objective.exploration)
        self._arrivals = Arrivals()

    def arrived(self, now_s: float) -> None:
        """A request has come that any backend may take. One that names its backend says nothing of the others' pace."""
        self._arrivals.note(now_s)

    def expecting(self, request: RoutingRequest, prompt_tokens: int) -> RoutingRequest:
        """With what its answer, or the rest of it, is taken to come to. `prompt_tokens`: with what there is of it."""
        generated = request.generated_tokens
        query = LengthQuery(
            request.workload,
            prompt_tokens - generated,
            request.max_new_tokens + generated,
            generated,
            ignore_eos=request.ignore_eos,
        )
        return replace(request, expected_new_tokens=self.lengths.expected(query))

    def outlook(
        self, name: str, snapshot: Snapshot, bookings: Iterable[Lease], *, now_s: float, received_at_s: float
    ) -> Outlook:
        """A backend's books, what is likely to come, and the reason to measure it, if there is one. `received_at_s`:
        when the Status came."""
        load = self.loads.of(name, snapshot, bookings, now_s=now_s, received_at_s=received_at_s)
        pace = snapshot.pace
        why = self._exploration.wanted(
            name,
            snapshot.incarnation,
            priced=load is not None or snapshot.rates is not None,
            model_age_s=None if pace is None else pace.model_age_s + now_s - received_at_s,
            now_s=now_s,
        )
        return Outlook(load, self._arrivals.coming_in_s(name), why)

    def booked(self, lease: Lease, price: Price, *, pinned: bool = False) -> None:
        """A request was sent somewhere. `pinned`: because it named that backend. That an answer goes on says nothing of
        where new requests go."""
        if not pinned and not lease.generated_tokens:
            self._arrivals.sent(lease.backend)
        if price.priced_by == EXPLORATION:
            self._exploration.begin(lease.backend, lease.incarnation, lease.attempt_id, lease.booked_s)

    def over(self, lease: Lease) -> None:
        """It is over, however it ended."""
        self._exploration.end(lease.attempt_id)

    def answered(self, lease: Lease, *, prompt_tokens: int, generated_tokens: int, ended: bool) -> None:
        """It was answered in full; tokens are the whole request's. `ended`: by the model or a stop string, not by
        max_new_tokens."""
        if not lease.ignore_eos:
            budget = lease.max_new_tokens + lease.generated_tokens
            self.lengths.observe(LengthOutcome(lease.workload, prompt_tokens, budget, generated_tokens, ended))
