"""What happens to backends while a scenario is played."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from phaseroute.scenarios.planned import Incident, IncidentKind
from service_kit.faults import InvalidRequest, UnknownName
from simulator.backend import VirtualBackend


def check_incidents(incidents: Sequence[Incident], backends: Collection[str]) -> None:
    """Raises `UnknownName` for a backend that is not there, `InvalidRequest` for a time or a factor that cannot be."""
    for place, incident in enumerate(incidents):
        where = f"incidents[{place}]"
        if incident.backend not in backends:
            raise UnknownName(
                f"{where} happens to {incident.backend!r}, but no backend is called so; "
                f"there are {', '.join(sorted(backends))}."
            )
        if not 0 <= incident.at_s < math.inf:
            raise InvalidRequest(f"{where}.at_s", f"is {incident.at_s}; give seconds since the start, 0 or more")
        if incident.kind is IncidentKind.SLOW and not 0 < incident.factor < math.inf:
            raise InvalidRequest(f"{where}.factor", f"is {incident.factor}; give more than 0: 2 is half as fast")


def strike(incident: Incident, backend: VirtualBackend, now_s: float) -> None:
    """Let it happen."""
    match incident.kind:
        case IncidentKind.FAIL:
            backend.fail(now_s)
        case IncidentKind.RETURN:
            backend.come_back(now_s)
        case IncidentKind.SLOW:
            backend.slow_down(incident.factor, now_s)
