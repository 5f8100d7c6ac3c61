"""Policies by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import replace

from router_service.policies.base import Policy
from router_service.policies.forced import Forced
from router_service.policies.least_loaded import LeastLoaded
from router_service.policies.predictive import Objective, Predictive
from router_service.policies.round_robin import RoundRobin
from router_service.policies.two_phase import TwoPhase
from service_kit.faults import InvalidRequest

POLICIES: dict[str, Callable[[random.Random, Objective], Policy]] = {
    "predictive": Predictive,
    "predictive_own": lambda rng, objective: Predictive(
        rng, replace(objective, others_weight=0.0, latest_weight=0.0), "predictive_own"
    ),
    "two_phase": lambda rng, _: TwoPhase(rng),
    "round_robin": lambda rng, _: RoundRobin(rng),
    "least_loaded": lambda rng, _: LeastLoaded(rng),
}
FORCED_PREFIX = "forced:"


def make_policy(name: str, backends: Collection[str], rng: random.Random, objective: Objective | None = None) -> Policy:
    """A policy over backends of these names. Raises `InvalidRequest` that lists what there is."""
    if name in POLICIES:
        return POLICIES[name](rng, objective or Objective())
    if name.startswith(FORCED_PREFIX):
        backend = name.removeprefix(FORCED_PREFIX)
        if backend in backends:
            return Forced(backend)
        raise InvalidRequest("routing.policy", f"{name!r} names no backend here; there are {_listed(backends)}")
    known = ", ".join([*sorted(POLICIES), f"{FORCED_PREFIX}<backend>"])
    raise InvalidRequest("routing.policy", f"{name!r} is no policy; use one of {known}")


def _listed(backends: Collection[str]) -> str:
    return ", ".join(sorted(backends))
