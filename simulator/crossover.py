"""Where a policy sends one more request while one backend is busy: the real policy, asked for each cell of a map."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from backend_service.step_model import KnownStepTimes
from phaseroute.scenarios.crossover import CrossoverMap
from phaseroute.scenarios.planned import Planned
from router_service.backend import as_candidate
from router_service.decision import Candidate, ProbeOutcome, RoutingRequest
from router_service.experience import Experience
from router_service.ledger import Ledger
from router_service.lengths import LengthEstimator, LengthOutcome, make_lengths
from router_service.policies.base import Policy
from router_service.policies.registry import make_policy
from router_service.snapshot import Snapshot
from service_kit.faults import UnknownName
from simulator.backend import BackendRules, VirtualBackend
from simulator.fleet import step_models
from simulator.profiles import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The request that is to be routed. Those ahead of it are of the same kind, and came just before."""

    prompt_tokens: int
    max_new_tokens: int
    workload: str = ""
    ignore_eos: bool = True
    """It goes on to max_new_tokens; else a policy that estimates lengths does so."""


def crossover_map(
    policy: str,
    fleet: Mapping[str, Profile],
    busy: str,
    *,
    asked: Asked,
    backlog: Sequence[int],
    cached_tokens: Sequence[int],
    lengths: LengthEstimator | None = None,
    note: str = "",
    seed: int = 0,
) -> CrossoverMap:
    """One policy's choices over `backlog` requests on `busy` and `cached_tokens` of the prompt in its cache; all other
    backends are idle and hold nothing. `lengths`: how the length of answers is estimated; None: `history` that has seen
    none.

    Raises `UnknownName` when `busy` is not in the fleet, `InvalidRequest` for an unknown policy, `ValueError` for a
    backlog below 0 or a cached prefix that is not shorter than the prompt.
    """
    if busy not in fleet:
        raise UnknownName(f"No backend is called {busy!r}; there are {', '.join(sorted(fleet))}.")
    if min(backlog, default=0) < 0 or not all(0 <= cached < asked.prompt_tokens for cached in cached_tokens):
        raise ValueError(f"give a backlog of 0 or more and cached prefixes from 0 to {asked.prompt_tokens - 1} tokens")
    names = tuple(fleet)
    cells = _Cells(
        {name: _idle(name, profile) for name, profile in fleet.items()},
        busy,
        asked,
        make_policy(policy, names, random.Random(seed)),
        Experience(lengths),
    )
    return CrossoverMap(
        policy=policy,
        backends=names,
        busy=busy,
        prompt_tokens=asked.prompt_tokens,
        new_tokens=asked.max_new_tokens,
        backlog=tuple(backlog),
        cached_tokens=tuple(cached_tokens),
        choice=tuple(tuple(names.index(cells.choice(rows, cached)) for cached in cached_tokens) for rows in backlog),
        note=note,
    )


def after(lengths: str, requests: Collection[Planned]) -> LengthEstimator:
    """A way to estimate lengths that has seen the answers to these requests. Raises `InvalidRequest` for an unknown
    one."""
    estimator = make_lengths(lengths)
    for planned in requests:
        if planned.new_tokens < planned.max_new_tokens:
            estimator.observe(
                LengthOutcome(
                    planned.workload, planned.prompt_tokens, planned.max_new_tokens, planned.new_tokens, ended=True
                )
            )
    return estimator


def _candidate(
    name: str, snapshot: Snapshot, ledger: Ledger, experience: Experience, cached: int, asked: Asked
) -> Candidate:
    """A backend as the router sees it at the moment of its Status, with what is booked there."""
    candidate = as_candidate(
        name,
        snapshot,
        ledger.pending(name),
        last_turn=ledger.last_turn(name),
        status_age_s=0.0,
        prompt_tokens=asked.prompt_tokens,
    )
    return replace(
        candidate,
        prompt_tokens_estimated=False,
        reusable_tokens=cached,
        probe=ProbeOutcome.ANSWERED,
        load=experience.loads.of(name, snapshot, ledger.unseen(name), now_s=0.0, received_at_s=0.0),
    )


@dataclass(frozen=True, slots=True)
class _Cells:
    snapshots: Mapping[str, Snapshot]
    busy: str
    asked: Asked
    policy: Policy
    experience: Experience

    def choice(self, backlog: int, cached_tokens: int) -> str:
        """The backlog is booked, not running: a burst that arrives at one moment."""
        asked, ledger = self.asked, Ledger()
        for _ in range(backlog):
            ledger.book(
                self.busy,
                self.snapshots[self.busy].incarnation,
                prompt_tokens=asked.prompt_tokens,
                reusable_tokens=cached_tokens,
                max_new_tokens=asked.max_new_tokens,
                workload=asked.workload,
                ignore_eos=asked.ignore_eos,
            )
        request = RoutingRequest(asked.max_new_tokens, asked.workload, ignore_eos=asked.ignore_eos)
        candidates = [
            _candidate(name, snapshot, ledger, self.experience, cached_tokens if name == self.busy else 0, asked)
            for name, snapshot in self.snapshots.items()
        ]
        return self.policy(self.experience.expecting(request, asked.prompt_tokens), candidates).selected


def _idle(name: str, profile: Profile) -> Snapshot:
    """What it publishes before its first request."""
    model = step_models({name: profile})[name]
    backend = VirtualBackend(name, profile, rules=BackendRules(), make_times=lambda: KnownStepTimes(model))
    published = backend.status(0.0)
    assert published is not None, "a new backend is up"
    return Snapshot.of(published.status)
