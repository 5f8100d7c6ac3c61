"""Who is a candidate for a request: before anybody was asked for a prefix, and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from router_service.decision import Candidate, Exclusion, RoutingRequest
from router_service.eligibility import eligible, within_context
from router_service.experience import Experience
from router_service.fleet import Fleet
from router_service.policies.base import Policy
from router_service.probe import ProbeReport
from router_service.prompt_size import PromptSize
from router_service.pruning import worth_asking
from router_service.snapshot import Snapshot
from router_service.wide import WIDE, PrefixKeys, Wide


@dataclass(frozen=True, slots=True)
class Look:
    """What is looked at for one request, from the question for prefixes to the choice."""

    policy: Policy
    request: RoutingRequest
    size: PromptSize
    keys: PrefixKeys
    failed: Mapping[str, str]
    """Why earlier attempts ended, by backend."""

    @property
    def generated_tokens(self) -> int:
        """Of the answer; they are to be computed like a longer prompt."""
        return self.request.generated_tokens


@dataclass(frozen=True, slots=True)
class Candidacies:
    """A fleet, split for one request."""

    candidates: Sequence[Candidate]
    exclusions: Sequence[Exclusion]
    not_shortlisted: int
    """Eligible backends of a wide fleet that were not looked at any closer."""


class Candidacy:
    """Looks at a fleet for one request after the other."""

    def __init__(self, fleet: Fleet, experience: Experience, wide: Wide, *, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._experience = experience
        self._wide = wide
        self._clock = clock

    def worth_asking(self, look: Look) -> Sequence[Candidate]:
        """Whom to ask for the prefix."""
        split = eligible(self._fleet.backends, look.request, look.failed, now_s=self._clock())
        size, generated = look.size, look.generated_tokens
        candidates: Sequence[Candidate] = [
            self._fleet.candidate(name, split.snapshots[name], size.guess_tokens + generated)
            for name in self._shortlist(look, split.snapshots)
        ]
        candidates, _ = within_context(
            candidates,
            look.request,
            prompt_tokens=size.at_least_tokens + generated,
            context_tokens=split.context_tokens,
        )
        at_most = None if size.at_most_tokens is None else size.at_most_tokens + generated
        return worth_asking(look.policy, look.request, candidates, at_most)

    def after(self, look: Look, report: ProbeReport, asked: Sequence[Candidate]) -> Candidacies:
        """Candidates on the newest Status and bookings, with what the probes told. Raises a backend's refusal when
        each of them finds the prompt invalid."""
        split = eligible(self._fleet.backends, look.request, look.failed, now_s=self._clock())
        names = list(split.snapshots)
        if len(names) > len(asked):
            shortlist = set(self._shortlist(look, split.snapshots)) | {candidate.name for candidate in asked}
            names = [name for name in names if name in shortlist]
        refused = [name for name in names if name in report.refusals]
        if refused and len(refused) == len(names) and not look.failed:
            raise report.refusals[refused[0]]
        candidates, too_small = within_context(
            [
                _with_answer(report.fill(self._candidate(look, name, split.snapshots[name])), look.generated_tokens)
                for name in names
                if name not in report.refusals
            ],
            look.request,
            prompt_tokens=(report.counted_tokens or look.size.at_least_tokens) + look.generated_tokens,
            context_tokens=split.context_tokens,
        )
        refusals = [Exclusion(name, f"refuses the prompt: {report.refusals[name]}") for name in refused]
        exclusions = [*split.exclusions, *refusals, *too_small]
        return Candidacies(candidates, exclusions, len(split.snapshots) - len(names))

    def _shortlist(self, look: Look, snapshots: Mapping[str, Snapshot]) -> Sequence[str]:
        if len(snapshots) <= WIDE:
            return list(snapshots)
        for name, snapshot in snapshots.items():
            self._wide.hear(name, snapshot, self._fleet.backends[name].received_at_s)
        return self._wide.narrow(
            snapshots,
            keys=look.keys,
            prompt_tokens=look.size.guess_tokens + look.generated_tokens,
            new_tokens=look.request.new_tokens,
            now_s=self._clock(),
        )

    def _candidate(self, look: Look, name: str, snapshot: Snapshot) -> Candidate:
        guess_tokens = look.size.guess_tokens
        if not look.policy.forecasts:
            return self._fleet.candidate(name, snapshot, guess_tokens)
        outlook = self._experience.outlook(
            name,
            snapshot,
            self._fleet.bookings(name),
            now_s=self._clock(),
            received_at_s=self._fleet.backends[name].received_at_s,
        )
        return self._fleet.candidate(name, snapshot, guess_tokens, outlook)


def _with_answer(candidate: Candidate, generated_tokens: int) -> Candidate:
    """What was generated before is computed again, behind the prompt."""
    if not generated_tokens:
        return candidate
    return replace(candidate, prompt_tokens=candidate.prompt_tokens + generated_tokens)
