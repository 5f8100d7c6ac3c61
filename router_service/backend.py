"""One backend as the router knows it: its last Status, and whether it can be given work."""

from __future__ import annotations

import random
from enum import Enum
from typing import Any

from router_service.breaker import Breaker, BreakerLimits
from router_service.decision import NO_OUTLOOK, Candidate, Outlook, ProbeOutcome
from router_service.ledger import Pending
from router_service.snapshot import Snapshot


class State(Enum):
    """As `BackendState` on the wire."""

    CONNECTING = "connecting"
    SERVING = "serving"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"


class Backend:
    """State only: what is heard is told to it, and times are passed in."""

    def __init__(self, name: str, target: str, stub: Any, breaker: Breaker | None = None) -> None:
        self.name = name
        self.target = target
        self.stub = stub
        """Its InferenceService."""
        self.breaker = breaker or Breaker(BreakerLimits(), random.Random())
        self.drained = False
        """DrainBackend was called."""
        self.drain_over = ""
        """Why what runs there is given up, once the grace of a drain is over; else empty."""
        self.snapshot: Snapshot | None = None
        """The last Status accepted; kept when the backend is lost."""
        self._received_at_s = 0.0
        self._problem: str | None = None
        self._gone = False
        self._stalled = ""

    def hear(self, snapshot: Snapshot, now_s: float, *, stalled: str = "") -> bool:
        """Take a Status in; False when it is older than the one already here, and then nothing changes. `stalled`: why
        the backend counts as hung by it, as a clause."""
        if self.snapshot is not None:
            if snapshot.older_than(self.snapshot):
                return False
            if snapshot.incarnation != self.snapshot.incarnation:
                self.breaker.restarted()
        self.snapshot = snapshot
        self._received_at_s = now_s
        self._problem = None
        self._gone = False
        self._stalled = stalled
        return True

    @property
    def received_at_s(self) -> float:
        """When the last Status came; 0 before the first."""
        return self._received_at_s

    def lose(self, problem: str, *, gone: bool = False) -> None:
        """Status stopped coming; `problem` says why. `gone`: what runs there will not come to an end either."""
        self._problem = problem
        self._gone = self._gone or gone

    def why_lost(self, incarnation: str) -> str:
        """Why attempts on that process of it are to be given up, as a sentence without a full stop; empty while they
        may come to an end."""
        if self.snapshot is not None and self.snapshot.incarnation != incarnation:
            return f"Backend {self.name} was restarted"
        if self._gone:
            return f"Backend {self.name} is lost: {self._problem}"
        if self._stalled:
            return f"Backend {self.name} {self._stalled}"
        return self.drain_over

    @property
    def state(self) -> State:
        """Worked out from what was heard last."""
        if self.snapshot is None:
            return State.CONNECTING
        if self._problem is not None or self._stalled:
            return State.UNREACHABLE
        if self.drained or self.snapshot.draining:
            return State.DRAINING
        return State.SERVING

    @property
    def detail(self) -> str:
        """Why it is not serving; empty when it is."""
        match self.state:
            case State.CONNECTING:
                return self._problem or f"no Status from {self.target} yet"
            case State.UNREACHABLE:
                return self._problem or self._stalled
            case State.DRAINING:
                return "DrainBackend was called on this router" if self.drained else "it says so itself"
            case State.SERVING:
                return ""

    def status_age_s(self, now_s: float) -> float:
        """Seconds since the last Status; 0 before the first."""
        return 0.0 if self.snapshot is None else max(0.0, now_s - self._received_at_s)


def as_candidate(
    name: str,
    snapshot: Snapshot,
    pending: Pending,
    *,
    last_turn: int,
    status_age_s: float,
    prompt_tokens: int,
    prompt_tokens_estimated: bool = True,
    reusable_tokens: int = 0,
    probe: ProbeOutcome = ProbeOutcome.SKIPPED,
    outlook: Outlook = NO_OUTLOOK,
) -> Candidate:
    """A serving backend, by default before anybody asked it for its prefix. A booking is counted as active while the
    batch has room for it, else as queued."""
    room = max(0, snapshot.max_active - snapshot.active - snapshot.queued)
    joining = min(room, pending.requests)
    return Candidate(
        name=name,
        active=snapshot.active + joining,
        queued=snapshot.queued + pending.requests - joining,
        waiting_prefill_tokens=snapshot.waiting_prefill_tokens + pending.prefill_tokens,
        waiting_decode_tokens=snapshot.waiting_decode_tokens + pending.decode_tokens,
        prompt_tokens=prompt_tokens,
        prompt_tokens_estimated=prompt_tokens_estimated,
        reusable_tokens=reusable_tokens,
        probe=probe,
        rates=snapshot.rates,
        max_active=snapshot.max_active,
        context_tokens=snapshot.context_tokens,
        precision=snapshot.precision,
        status_age_s=status_age_s,
        last_turn=last_turn,
        load=outlook.load,
        coming_in_s=outlook.coming_in_s,
        unmeasured=outlook.unmeasured,
    )
