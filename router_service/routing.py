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
from router_service.backend import State
from router_service.decision import Candidate, Choice, Decision, Exclusion, RoutingRequest
from router_service.eligibility import eligible, within_context
from router_service.fleet import Fleet
from router_service.ledger import Lease, Ledger
from router_service.policies.base import Policy
from router_service.policies.registry import make_policy
from router_service.probe import Answer, ProbeReport, probe
from router_service.prompt_size import PromptSize, prompt_size
from router_service.pruning import worth_asking
from router_service.tracing import route_attributes
from service_kit.faults import Unavailable
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
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`policy` is for requests that name none. Raises `InvalidRequest` when there is no such policy."""
        self._fleet = fleet
        self._ledger = ledger
        self._policy = policy
        self._probe_timeout_s = probe_timeout_s
        self._telemetry = telemetry
        self._rng = rng or random.Random()
        self._clock = clock
        self._make_policy("")

    async def decide(
        self,
        prompt: pb.Prompt,
        spec: GenerateSpec,
        *,
        book: bool,
        failed: Mapping[str, str] | None = None,
        time_left_s: float | None = None,
    ) -> Routed:
        """Decide where a request goes, and book it there unless this is a dry run.

        `prompt` is the wire form of `spec.prompt`; `failed` says why earlier attempts ended, by backend. Raises
        `InvalidRequest` or `UnknownName` for requests that no state of the fleet could satisfy, and the backends' own
        refusal when each of them finds the prompt invalid. That nobody can take the request is a decision too.
        """
        failed = failed or {}
        request = RoutingRequest.of(spec)
        policy = self._make_policy(spec.routing.policy)
        with self._telemetry.span("route") as span:
            size = prompt_size(spec.prompt)
            probe_from_s = self._clock()
            asked = self._worth_asking(policy, request, size, failed)
            report = await probe(
                [self._fleet.backends[candidate.name] for candidate in asked],
                prompt,
                size,
                timeout_s=self._probe_time_s(time_left_s),
                telemetry=self._telemetry,
            )
            # From here to the booking nothing is awaited: the next decision sees this one's booking.
            choose_from_s = self._clock()
            candidates, exclusions = self._candidates(request, report, failed)
            choice = policy(request, candidates) if candidates else Choice("", {}, "No backend can take this request")
            if not choice.selected:
                choice = replace(choice, reason=_with_exclusions(choice.reason, exclusions))
            chosen = next((candidate for candidate in candidates if candidate.name == choice.selected), None)
            lease = self._book(chosen, spec) if book and chosen else None
            decision = Decision(
                id=str(uuid.uuid4()),
                time=datetime.datetime.now(datetime.UTC),
                policy=policy.name,
                request=request,
                candidates=candidates,
                exclusions=exclusions,
                choice=choice,
                probe_s=choose_from_s - probe_from_s,
                choose_s=self._clock() - choose_from_s,
                attempt=len(failed) + 1,
            )
            if span.is_recording():
                span.set_attributes(route_attributes(decision))
        return Routed(decision, lease)

    async def best_prefix(self, prompt: pb.Prompt, parsed: Prompt, *, time_left_s: float | None) -> Answer:
        """The largest reusable prefix of any serving backend that is not left out; what a router answers to CacheProbe.

        Raises a backend's refusal when each of them finds the prompt invalid, `Unavailable` when none answers.
        """
        backends = [
            backend
            for backend in self._fleet.backends.values()
            if backend.state is State.SERVING and not self._fleet.left_out(backend)
        ]
        report = await probe(
            backends,
            prompt,
            prompt_size(parsed),
            timeout_s=self._probe_time_s(time_left_s),
            telemetry=self._telemetry,
        )
        if report.answers:
            return max(report.answers.values(), key=lambda answer: answer.reusable_tokens)
        if report.refusals and len(report.refusals) == len(backends):
            raise next(iter(report.refusals.values()))
        raise Unavailable("No backend answered the question for its prefix; try again later.")

    def _make_policy(self, name: str) -> Policy:
        return make_policy(name or self._policy, self._fleet.backends.keys(), self._rng)

    def _probe_time_s(self, time_left_s: float | None) -> float:
        if time_left_s is None:
            return self._probe_timeout_s
        # A router that is probed has to probe its own backends within that.
        return min(self._probe_timeout_s, time_left_s / 4)

    def _worth_asking(
        self, policy: Policy, request: RoutingRequest, size: PromptSize, failed: Mapping[str, str]
    ) -> Sequence[Candidate]:
        split = eligible(self._fleet.backends, request, failed)
        candidates: Sequence[Candidate] = [
            self._fleet.candidate(name, snapshot, size.guess_tokens) for name, snapshot in split.snapshots.items()
        ]
        candidates, _ = within_context(
            candidates, request, prompt_tokens=size.at_least_tokens, context_tokens=split.context_tokens
        )
        return worth_asking(policy, request, candidates, size.at_most_tokens)

    def _candidates(
        self, request: RoutingRequest, report: ProbeReport, failed: Mapping[str, str]
    ) -> tuple[Sequence[Candidate], Sequence[Exclusion]]:
        """Candidates on the newest Status and bookings, with what the probes told."""
        split = eligible(self._fleet.backends, request, failed)
        refused = [name for name in split.snapshots if name in report.refusals]
        if refused and len(refused) == len(split.snapshots) and not failed:
            raise report.refusals[refused[0]]
        candidates, too_small = within_context(
            [
                report.fill(self._fleet.candidate(name, snapshot, report.size.guess_tokens))
                for name, snapshot in split.snapshots.items()
                if name not in report.refusals
            ],
            request,
            prompt_tokens=report.counted_tokens or report.size.at_least_tokens,
            context_tokens=split.context_tokens,
        )
        refusals = [Exclusion(name, f"refuses the prompt: {report.refusals[name]}") for name in refused]
        return candidates, [*split.exclusions, *refusals, *too_small]

    def _book(self, chosen: Candidate, spec: GenerateSpec) -> Lease:
        snapshot = self._fleet.backends[chosen.name].snapshot
        lease = self._ledger.book(
            chosen.name,
            snapshot.incarnation if snapshot else "",
            prompt_tokens=chosen.prompt_tokens,
            reusable_tokens=chosen.reusable_tokens,
            max_new_tokens=spec.max_new_tokens,
            priority=spec.priority,
            origin=spec.attempt_id,
        )
        self._fleet.changes.publish(None)
        return lease


def _with_exclusions(reason: str, exclusions: Sequence[Exclusion]) -> str:
    fewest, most = REASON_ROOM
    heads = [f"{exclusion.name} is out: " for exclusion in exclusions]
    room = (REASONS_ROOM - sum(len(head) + 2 for head in heads)) // max(1, len(heads))
    room = max(fewest, min(most, room))
    reasons = [shorten(exclusion.why, room, placeholder="…") for exclusion in exclusions]
    return f"{reason}: {'; '.join(head + why for head, why in zip(heads, reasons, strict=True))}"
