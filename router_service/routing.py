"""One decision: who may take a request, what they hold of it already, who finishes it first; then the booking."""

from __future__ import annotations

import datetime
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten

from phaseroute.v1 import inference_pb2 as pb
from router_service.candidacy import Candidacy, Look
from router_service.decision import Candidate, Choice, Decision, Exclusion, Price, RoutingRequest
from router_service.experience import Experience
from router_service.fleet import Fleet
from router_service.ledger import Lease, Ledger
from router_service.policies.base import Policy
from router_service.policies.predictive import Objective
from router_service.policies.registry import make_policy
from router_service.probe import Answer, probe
from router_service.prompt_size import prompt_size
from router_service.recent_prefixes import key_of
from router_service.tracing import route_attributes
from router_service.wide import WIDE, PrefixKeys, Wide
from service_kit.faults import Unavailable
from service_kit.identity import ANYONE, Caller
from service_kit.requests import GenerateSpec, Prompt
from service_kit.telemetry import Telemetry

REASONS_ROOM = 420
"""Characters for all backends in the sentence that lists them: it must fit a status message."""
REASON_ROOM = (24, 120)
"""Fewest and most for one backend's reason."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A decision and what was booked on it."""

    decision: Decision
    lease: Lease | None
    """None when nobody could take the request, and for a dry run."""


class Routing:
    """Makes decisions over a fleet; keeps no state of its own."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        *,
        policy: str,
        probe_timeout_s: float,
        telemetry: Telemetry,
        objective: Objective | None = None,
        experience: Experience | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`policy` is for requests that name none. Raises `InvalidRequest` when there is no such policy."""
        self._fleet = fleet
        self._ledger = ledger
        self._policy = policy
        self._objective = objective or Objective()
        self._experience = experience or Experience(objective=self._objective)
        self._probe_timeout_s = probe_timeout_s
        self._telemetry = telemetry
        self._rng = rng or random.Random()
        self._clock = clock
        self._wide = Wide(fleet.backends.keys(), ledger, self._rng)
        self._candidacy = Candidacy(fleet, self._experience, self._wide, clock=clock)
        self._make_policy("")

    async def decide(
        self,
        prompt: pb.Prompt,
        spec: GenerateSpec,
        *,
        book: bool,
        failed: Mapping[str, str] | None = None,
        time_left_s: float | None = None,
        caller: Caller = ANYONE,
        generated: int = 0,
    ) -> Routed:
        """Decide where a request goes, and book it there unless this is a dry run.

        `prompt` is the wire form of `spec.prompt`; `failed` says why earlier attempts ended, by backend; `generated`
        tokens of the answer exist already: they are computed again behind the prompt, and the budget is less. Raises
        `InvalidRequest` or `UnknownName` for requests that no state of the fleet could satisfy, and the backends' own
        refusal when each of them finds the prompt invalid. That nobody can take the request is a decision too.
        """
        salt = caller.salt(spec.cache_salt)
        look = Look(
            self._make_policy(spec.routing.policy),
            RoutingRequest.of(
                spec,
                # Whoever reads the beginning of an answer has more of it going on than of a refusal.
                deadline_s=None if generated else time_left_s,
                generated=generated,
                client=caller.client(spec.client),
            ),
            prompt_size(spec.prompt),
            key_of(spec.prompt, salt) if self._wide_fleet else (),
            failed or {},
        )
        if book and not look.failed and not generated and not look.request.hints.backend:
            self._experience.arrived(self._clock())
        with self._telemetry.span("route") as span:
            probe_from_s = self._clock()
            asked = self._candidacy.worth_asking(look)
            report = await probe(
                [self._fleet.backends[candidate.name] for candidate in asked],
                prompt,
                look.size,
                cache_salt=salt,
                timeout_s=self._probe_time_s(time_left_s),
                telemetry=self._telemetry,
            )
            # From here to the booking nothing is awaited: the next decision sees this one's booking.
            choose_from_s = self._clock()
            found = self._candidacy.after(look, report, asked)
            candidates, request = found.candidates, look.request
            if candidates:
                request = self._experience.expecting(request, candidates[0].prompt_tokens)
                choice = look.policy(request, candidates)
            else:
                choice = Choice("", {}, "No backend can take this request")
            if choice.selected and generated:
                choice = replace(choice, reason=f"{choice.reason}; it goes on after {generated} tokens")
            if not choice.selected and found.exclusions:
                choice = replace(choice, reason=_with_exclusions(choice.reason, found.exclusions))
            chosen = next((candidate for candidate in candidates if candidate.name == choice.selected), None)
            lease = self._book(chosen, spec, request, choice, look.keys) if book and chosen else None
            decision = Decision(
                id=str(uuid.uuid4()),
                time=datetime.datetime.now(datetime.UTC),
                policy=look.policy.name,
                request=request,
                candidates=candidates,
                exclusions=found.exclusions,
                not_shortlisted=found.not_shortlisted,
                choice=choice,
                probe_s=choose_from_s - probe_from_s,
                choose_s=self._clock() - choose_from_s,
                attempt=len(look.failed) + 1,
            )
            if span.is_recording():
                span.set_attributes(route_attributes(decision))
        return Routed(decision, lease)

    def release(self, lease: Lease, answered: pb.Finished | None) -> None:
        """An attempt is over; `answered` is its last message, None when there was none. What it taught is kept."""
        self._ledger.release(lease)
        self._fleet.released(lease, answered=answered is not None)
        self._experience.over(lease)
        if answered is not None:
            self._experience.answered(
                lease,
                prompt_tokens=answered.usage.prompt_tokens,
                generated_tokens=answered.usage.generated_tokens,
                ended=answered.finish_reason != pb.FINISH_REASON_LENGTH,
            )

    async def best_prefix(
        self, prompt: pb.Prompt, parsed: Prompt, *, cache_salt: str = "", time_left_s: float | None
    ) -> Answer:
        """The largest reusable prefix of any backend in use that is not left out; what a router answers to CacheProbe.

        Raises a backend's refusal when each of them finds the prompt invalid, `Unavailable` when none answers.
        """
        backends = [backend for backend in self._fleet.in_use if not self._fleet.left_out(backend)]
        report = await probe(
            backends,
            prompt,
            prompt_size(parsed),
            cache_salt=cache_salt,
            timeout_s=self._probe_time_s(time_left_s),
            telemetry=self._telemetry,
        )
        if report.answers:
            return max(report.answers.values(), key=lambda answer: answer.reusable_tokens)
        if report.refusals and len(report.refusals) == len(backends):
            raise next(iter(report.refusals.values()))
        raise Unavailable("No backend answered the question for its prefix; try again later.")

    @property
    def _wide_fleet(self) -> bool:
        return len(self._fleet.backends) > WIDE

    def _make_policy(self, name: str) -> Policy:
        return make_policy(name or self._policy, self._fleet.backends.keys(), self._rng, self._objective)

    def _probe_time_s(self, time_left_s: float | None) -> float:
        if time_left_s is None:
            return self._probe_timeout_s
        # A router that is probed has to probe its own backends within that.
        return min(self._probe_timeout_s, time_left_s / 4)

    def _book(
        self, chosen: Candidate, spec: GenerateSpec, request: RoutingRequest, choice: Choice, keys: PrefixKeys
    ) -> Lease:
        snapshot = self._fleet.backends[chosen.name].snapshot
        price = choice.prices.get(chosen.name, Price())
        now_s = self._clock()
        lease = self._ledger.book(
            chosen.name,
            snapshot.incarnation if snapshot else "",
            prompt_tokens=chosen.prompt_tokens,
            reusable_tokens=chosen.reusable_tokens,
            max_new_tokens=request.max_new_tokens,
            priority=spec.priority,
            origin=spec.attempt_id,
            now_s=now_s,
            workload=spec.workload,
            ignore_eos=spec.ignore_eos,
            client=request.client,
            generated_tokens=request.generated_tokens,
            finish_s=None if price.predicted_finish_s is None else now_s + price.predicted_finish_s,
        )
        self._experience.booked(lease, price, pinned=bool(spec.routing.backend))
        if self._wide_fleet:
            self._wide.booked(lease, keys)
        self._fleet.booked(lease)
        return lease


def _with_exclusions(reason: str, exclusions: Sequence[Exclusion]) -> str:
    fewest, most = REASON_ROOM
    heads = [f"{exclusion.name} is out: " for exclusion in exclusions]
    room = (REASONS_ROOM - sum(len(head) + 2 for head in heads)) // max(1, len(heads))
    room = max(fewest, min(most, room))
    reasons = [shorten(exclusion.why, room, placeholder="…") for exclusion in exclusions]
    return f"{reason}: {'; '.join(head + why for head, why in zip(heads, reasons, strict=True))}"
