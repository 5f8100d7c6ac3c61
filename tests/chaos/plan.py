"""Which faults come in which order: planned from a seed."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

ROUTER_FREE_TAIL = 0.2
"""Part of the plan, at its end, without router faults: the router that is looked at afterwards has lived a while."""


class FaultKind(enum.Enum):
    """What can happen to a fleet."""

    KILL = "kill"
    """SIGKILL, then a new process."""
    TERM = "term"
    """SIGTERM, then a new process."""
    STOP = "stop"
    """SIGSTOP, then SIGCONT."""
    SLOW = "slow"
    """Stopped nine tenths of the time."""
    CUT = "cut"
    """Connections are reset and refused."""
    BLACKHOLE = "blackhole"
    """Connections stay, nothing passes."""
    HALF_OPEN = "half_open"
    """What the router says passes, what the backend says does not."""
    DELAY = "delay"
    """Everything takes longer on the way."""
    DRAIN = "drain"
    """DrainBackend, then taken back."""
    ROUTER_TERM = "router_term"
    ROUTER_KILL = "router_kill"

    @property
    def of_router(self) -> bool:
        """It happens to the router."""
        return self in (FaultKind.ROUTER_TERM, FaultKind.ROUTER_KILL)


_WEIGHTS = {
    FaultKind.KILL: 5,
    FaultKind.TERM: 3,
    FaultKind.STOP: 3,
    FaultKind.SLOW: 2,
    FaultKind.CUT: 3,
    FaultKind.BLACKHOLE: 2,
    FaultKind.HALF_OPEN: 2,
    FaultKind.DELAY: 2,
    FaultKind.DRAIN: 3,
    FaultKind.ROUTER_TERM: 1,
    FaultKind.ROUTER_KILL: 0.5,
}


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault. What it really hit, and when, is in the fault log."""

    index: int
    kind: FaultKind
    backend: int
    """Hit this one, or the next one after it that is whole."""
    lasts_s: float
    grace_s: float | None
    """For DRAIN; None: running streams may end there."""


def plan_faults(seed: int, count: int, backends: int, *, router_faults: bool = True) -> Sequence[PlannedFault]:
    """A kill first, then every other kind once before any comes twice, as far as `count` allows."""
    chance = random.Random(f"faults {seed}")
    last_of_router = int(count * (1 - ROUTER_FREE_TAIL))
    backend_kinds = [kind for kind in FaultKind if not kind.of_router]
    once = [kind for kind in FaultKind if router_faults or not kind.of_router]
    chance.shuffle(once)
    once.sort(key=lambda kind: kind is FaultKind.KILL)  # taken from the end
    faults = []
    for index in range(count):
        at_router = router_faults and index < last_of_router
        kinds = [kind for kind in FaultKind if at_router or not kind.of_router]
        kind = chance.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
        if once:
            kind = once.pop()
            if kind.of_router and not at_router:
                kind = chance.choice(backend_kinds)
        faults.append(
            PlannedFault(
                index=index,
                kind=kind,
                backend=chance.randrange(backends),
                lasts_s=round(_lasts_s(kind, chance), 2),
                grace_s=chance.choice((None, 0.0, 0.5)),
            )
        )
    return faults


def _lasts_s(kind: FaultKind, chance: random.Random) -> float:
    match kind:
        case FaultKind.STOP | FaultKind.BLACKHOLE | FaultKind.HALF_OPEN:
            return chance.choice((0.3, 1.0, 6.0))
        case FaultKind.SLOW | FaultKind.DELAY:
            return chance.uniform(1.0, 3.0)
        case _:
            return chance.uniform(0.1, 1.5)
