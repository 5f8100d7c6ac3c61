"""Policies by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from router_service.policies.base import Policy
from router_service.policies.forced import Forced
from router_service.policies.least_loaded import LeastLoaded
from router_service.policies.round_robin import RoundRobin
from router_service.policies.two_phase import TwoPhase
from service_kit.faults import InvalidRequest

POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "two_phase": TwoPhase,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
}
FORCED_PREFIX = "forced:"


def make_policy(name: str, backends: Collection[str], rng: random.Random) -> Policy:
    """A policy over backends of these names. Raises `InvalidRequest` that lists what there is."""
    if name in POLICIES:
        return POLICIES[name](rng)
    if name.startswith(FORCED_PREFIX):
        backend = name.removeprefix(FORCED_PREFIX)
        if backend in backends:
            return Forced(backend)
        raise InvalidRequest("routing.policy", f"{name!r} names no backend here; there are {_listed(backends)}")
    known = ", ".join([*sorted(POLICIES), f"{FORCED_PREFIX}<backend>"])
    raise InvalidRequest("routing.policy", f"{name!r} is no policy; use one of {known}")


def _listed(backends: Collection[str]) -> str:
    return ", ".join(sorted(backends))
