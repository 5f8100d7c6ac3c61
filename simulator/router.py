"""The router in virtual time: the real ledger and policies over what the backends publish. The wire is left out, and
every probe is answered at once and exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from backend_service.request import Ended, FinishReason
from phaseroute.scenarios.planned import Planned
from router_service.backend import as_candidate
from router_service.decision import NO_OUTLOOK, Candidate, Choice, Price, ProbeOutcome, RoutingRequest
from router_service.experience import Experience
from router_service.ledger import Lease, Ledger
from router_service.lengths import make_lengths
from router_service.policies.predictive import Objective
from router_service.policies.registry import make_policy
from router_service.recent_prefixes import key_of
from router_service.snapshot import Snapshot
from router_service.wide import WIDE, PrefixKeys, Wide
from service_kit.requests import Priority, RoutingHints, TokenPrompt
from simulator.backend import Published


class Backend(Protocol):
    """What a router sees of a backend."""

    @property
    def up(self) -> bool:
        """It can be reached."""

    @property
    def context_tokens(self) -> int:
        """The largest prompt + new tokens that it takes."""

    def on_news(self, listener: Callable[[str], None]) -> None:
        """Call this with the backend's name when a Status tells more than progress, and when it fails."""

    def status(self, now_s: float) -> Published | None:
        """The last Status, the same object until the next; None while it is down."""

    def probe(self, tokens: Sequence[int]) -> int:
        """Leading tokens of a prompt that it need not compute."""


@dataclass(frozen=True, slots=True)
class Routed:
    """One decision, and what was booked on it."""

    index: int
    """Of the request in its scenario."""
    at_s: float
    candidates: tuple[Candidate, ...]
    choice: Choice
    lease: Lease | None
    """None when nobody could take the request."""
    code: str
    """What the client is told then: a gRPC status code's name; "OK" with a lease."""

    @property
    def backend(self) -> str:
        """Where the request goes; empty for nowhere."""
        return self.choice.selected

    @property
    def price(self) -> Price:
        """Of the chosen backend."""
        return self.choice.prices.get(self.choice.selected, Price())

    @property
    def reusable_tokens(self) -> int:
        """Of the prompt, on the chosen backend."""
        return self.lease.reusable_tokens if self.lease else 0


class Router(Protocol):
    """What plays a router's part."""

    def decide(
        self,
        index: int,
        planned: Planned,
        prompt: Sequence[int],
        now_s: float,
        *,
        failed: Collection[str] = (),
        time_left_s: float | None = None,
    ) -> Routed:
        """Choose a backend that has not failed this request, and book it. `time_left_s`: until its deadline."""

    def ended(self, lease: Lease, ended: Ended) -> None:
        """The request was answered in full."""

    def lost(self, lease: Lease) -> None:
        """The attempt failed, or was given up."""


class VirtualRouter:
    """Decides and books; is told what becomes of it."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        *,
        policy: str,
        lengths: str,
        seed: int,
        sample: int | None = None,
        objective: Objective | None = None,
    ) -> None:
        """`sample`: look at so many backends a request, drawn at random; None: at all, or in a wide fleet at the
        router's own shortlist. Raises `InvalidRequest` for an unknown policy or way to estimate lengths."""
        self._backends = backends
        self._names = list(backends)
        self._policy = make_policy(policy, backends.keys(), random.Random(seed), objective)
        self._experience = Experience(make_lengths(lengths), objective)
        self._sample = sample
        self._rng = random.Random(seed)
        self._ledger = Ledger()
        self._wide = Wide(self._names, self._ledger, self._rng) if len(self._names) > WIDE else None
        self._heard: dict[str, tuple[Published, Snapshot]] = {}
        self._news = dict.fromkeys(self._names)
        """Of a wide fleet: who has more to tell than progress, in the order of that."""
        self._up: set[str] = set()
        """Of a wide fleet: who is up, as of its last news."""
        if self._wide is not None:
            for backend in backends.values():
                backend.on_news(self._news.setdefault)

    def decide(
        self,
        index: int,
        planned: Planned,
        prompt: Sequence[int],
        now_s: float,
        *,
        failed: Collection[str] = (),
        time_left_s: float | None = None,
    ) -> Routed:
        """See `Router`."""
        if not failed:
            self._experience.arrived(now_s)
        keys = key_of(TokenPrompt(tuple(prompt))) if self._wide is not None else ()
        names = [name for name in self._shortlist(planned, prompt, keys, now_s) if name not in failed]
        heard = {name: snapshot for name in names if (snapshot := self._hear(name, now_s)) is not None}
        candidates = tuple(self._candidate(name, snapshot, prompt, now_s) for name, snapshot in heard.items())
        needed = planned.prompt_tokens + planned.max_new_tokens
        fitting = tuple(candidate for candidate in candidates if needed <= candidate.context_tokens)
        if not fitting:
            code = "INVALID_ARGUMENT" if candidates else "UNAVAILABLE"
            return Routed(index, now_s, candidates, Choice("", {}, "No backend can take this request"), None, code)
        request = self._experience.expecting(
            RoutingRequest(
                planned.max_new_tokens,
                planned.workload,
                hints=RoutingHints(ttft_slo_s=planned.ttft_slo_s),
                batch=planned.batch,
                ignore_eos=planned.new_tokens == planned.max_new_tokens,
                deadline_s=time_left_s,
            ),
            len(prompt),
        )
        choice = self._policy(request, fitting)
        if not choice.selected:
            code = "UNAVAILABLE" if choice.retry_after_s is None else "RESOURCE_EXHAUSTED"
            return Routed(index, now_s, fitting, choice, None, code)
        chosen = next(candidate for candidate in fitting if candidate.name == choice.selected)
        incarnation = self._heard[chosen.name][1].incarnation
        lease = _book(self._ledger, planned, chosen.name, incarnation, chosen.reusable_tokens, now_s)
        self._experience.booked(lease, choice.prices.get(chosen.name, Price()))
        if self._wide is not None:
            self._wide.booked(lease, keys)
        return Routed(index, now_s, fitting, choice, lease, "OK")

    def ended(self, lease: Lease, ended: Ended) -> None:
        """See `Router`."""
        self.lost(lease)
        self._experience.answered(
            lease,
            prompt_tokens=ended.prompt_tokens,
            generated_tokens=ended.generated_tokens,
            ended=ended.reason is not FinishReason.LENGTH,
        )

    def lost(self, lease: Lease) -> None:
        """See `Router`."""
        self._ledger.release(lease)
        self._experience.over(lease)

    def _shortlist(self, planned: Planned, prompt: Sequence[int], keys: PrefixKeys, now_s: float) -> Iterable[str]:
        """Whom to look at."""
        if self._sample is not None and self._sample < len(self._names):
            return self._rng.sample(self._names, self._sample)
        if self._wide is None:
            return self._names
        for name in self._news:
            snapshot = self._hear(name, now_s)
            if snapshot is None:
                self._up.discard(name)
            else:
                self._up.add(name)
                self._wide.hear(name, snapshot, self._heard[name][0].at_s)
        self._news.clear()
        return self._wide.narrow(
            self._up,
            keys=keys,
            prompt_tokens=len(prompt),
            new_tokens=planned.max_new_tokens,
            now_s=now_s,
        )

    def _hear(self, name: str, now_s: float) -> Snapshot | None:
        """The backend's newest Status; None while it is down."""
        published = self._backends[name].status(now_s)
        if published is None:
            return None
        heard = self._heard.get(name)
        if heard is None or heard[0] is not published:
            heard = self._heard[name] = (published, Snapshot.of(published.status))
            self._ledger.on_status(name, heard[1].incarnation, heard[1].attempt_ids)
        return heard[1]

    def _candidate(self, name: str, snapshot: Snapshot, prompt: Sequence[int], now_s: float) -> Candidate:
        received_at_s = self._heard[name][0].at_s
        outlook = NO_OUTLOOK
        if self._policy.forecasts:
            bookings = self._ledger.unseen(name)
            outlook = self._experience.outlook(name, snapshot, bookings, now_s=now_s, received_at_s=received_at_s)
        return as_candidate(
            name,
            snapshot,
            self._ledger.pending(name),
            last_turn=self._ledger.last_turn(name),
            status_age_s=now_s - received_at_s,
            prompt_tokens=len(prompt),
            prompt_tokens_estimated=False,
            reusable_tokens=self._backends[name].probe(prompt),
            probe=ProbeOutcome.ANSWERED,
            outlook=outlook,
        )


class AssignedRouter:
    """Sends each request where it is told to, whatever happens there, and knows nothing: for searches."""

    def __init__(self, backends: Mapping[str, Backend], assignment: Sequence[str]) -> None:
        """`assignment`: a backend for each request, in order of arrival."""
        self._backends = backends
        self._assignment = assignment
        self._ledger = Ledger()

    def decide(
        self,
        index: int,
        planned: Planned,
        prompt: Sequence[int],
        now_s: float,
        *,
        failed: Collection[str] = (),
        time_left_s: float | None = None,
    ) -> Routed:
        """See `Router`."""
        name = self._assignment[index]
        backend = self._backends[name]
        choice = Choice(name, {}, f"{name} was assigned")
        if name in failed or not backend.up:
            return Routed(index, now_s, (), replace(choice, selected=""), None, "UNAVAILABLE")
        if len(prompt) + planned.max_new_tokens > backend.context_tokens:
            return Routed(index, now_s, (), replace(choice, selected=""), None, "INVALID_ARGUMENT")
        reusable_tokens = backend.probe(prompt)
        return Routed(index, now_s, (), choice, _book(self._ledger, planned, name, "", reusable_tokens, now_s), "OK")

    def ended(self, lease: Lease, ended: Ended) -> None:
        """See `Router`."""
        self._ledger.release(lease)

    def lost(self, lease: Lease) -> None:
        """See `Router`."""
        self._ledger.release(lease)


def _book(
    ledger: Ledger, planned: Planned, backend: str, incarnation: str, reusable_tokens: int, now_s: float
) -> Lease:
    return ledger.book(
        backend,
        incarnation,
        prompt_tokens=planned.prompt_tokens,
        reusable_tokens=reusable_tokens,
        max_new_tokens=planned.max_new_tokens,
        priority=Priority.BATCH if planned.batch else Priority.INTERACTIVE,
        now_s=now_s,
        workload=planned.workload,
        ignore_eos=planned.new_tokens == planned.max_new_tokens,
    )
