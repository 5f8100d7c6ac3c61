"""What a policy sees, what it answers, and the complete record of one decision.

Work is counted in tokens and priced in seconds. Every value here is frozen; nothing reads a clock.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from phaseroute.v1 import inference_pb2, router_pb2
from router_service.forecast import Job, Load
from router_service.forecast_record import forecast_to_proto
from service_kit.requests import GenerateSpec, Priority, RoutingHints


class ProbeOutcome(Enum):
    """How a backend answered the question for its reusable prefix."""

    ANSWERED = "answered"
    LATE = "late"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not asked: even a full hit could not have won."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of one request alone on a backend; both above 0."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A backend as a policy sees it: what waits there, bookings included, and this request's prompt."""

    name: str
    active: int
    queued: int
    waiting_prefill_tokens: int
    waiting_decode_tokens: int
    prompt_tokens: int
    """This request's prompt, by this backend's tokenizer, and what was generated of its answer before."""
    prompt_tokens_estimated: bool = False
    reusable_tokens: int = 0
    """Leading prompt tokens in its KV cache; below prompt_tokens."""
    probe: ProbeOutcome = ProbeOutcome.ANSWERED
    rates: Rates | None = None
    """None: not measured. A policy never makes one up."""
    max_active: int = 1
    """The largest batch it runs."""
    context_tokens: int = 0
    """The largest prompt + new tokens it takes."""
    precision: str = ""
    """How it holds the model's weights."""
    status_age_s: float = 0.0
    last_turn: int = 0
    """Grows with every booking in the fleet: this backend's latest, 0 before its first."""
    load: Load | None = None
    """Its books for a forecast; None without a usable step model."""
    coming_in_s: tuple[float, ...] = ()
    """In how many seconds requests like this one are likely to be sent here too."""
    unmeasured: str = ""
    """Why a request with time to spare should be sent here to measure it; empty where that is not wanted now."""

    @property
    def requests(self) -> int:
        """Everything it has to do, active or queued."""
        return self.active + self.queued

    @property
    def prefill_tokens(self) -> int:
        """Waiting there plus what this request adds."""
        return self.waiting_prefill_tokens + self.prompt_tokens - self.reusable_tokens

    def decode_tokens(self, max_new_tokens: int) -> int:
        """Decode budget waiting there plus this request's."""
        return self.waiting_decode_tokens + max_new_tokens


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a forecast needs to know of a candidate; see the fields of `Candidate`."""

    load: Load | None = None
    coming_in_s: tuple[float, ...] = ()
    unmeasured: str = ""


NO_OUTLOOK = Outlook()


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The part of a request that routing reads, its prompt aside."""

    max_new_tokens: int
    """What may still come of its answer."""
    workload: str = ""
    model: str = ""
    """Empty: whatever is served."""
    hints: RoutingHints = field(default_factory=RoutingHints)
    batch: bool = False
    """Nobody watches the answer come."""
    ignore_eos: bool = False
    """It goes on to max_new_tokens."""
    expected_new_tokens: float | None = None
    """What the answer is taken to come to; None: max_new_tokens."""
    deadline_s: float | None = None
    """Left until the caller gives up; None: it waits."""
    generated_tokens: int = 0
    """Of its answer, by backends that were lost since: part of what is to be computed before the next token."""
    client: str = ""
    """Whose request it is; empty where clients are not told apart."""

    @property
    def new_tokens(self) -> float:
        """What a forecast counts on; 1 at least."""
        expected = self.max_new_tokens if self.expected_new_tokens is None else self.expected_new_tokens
        return max(1.0, min(expected, self.max_new_tokens))

    @classmethod
    def of(
        cls, spec: GenerateSpec, *, deadline_s: float | None = None, generated: int = 0, client: str = ""
    ) -> RoutingRequest:
        """Taken from a checked request, of whose answer so many tokens exist."""
        return cls(
            max(0, spec.max_new_tokens - generated),
            spec.workload,
            spec.model,
            spec.routing,
            batch=spec.priority is Priority.BATCH,
            ignore_eos=spec.ignore_eos,
            deadline_s=deadline_s,
            generated_tokens=generated,
            client=client,
        )


@dataclass(frozen=True, slots=True)
class Price:
    """What a policy expects of one candidate, in seconds from the decision; None where it expects nothing."""

    score_s: float | None = None
    """Lowest wins."""
    predicted_ttft_s: float | None = None
    predicted_finish_s: float | None = None
    priced_by: str = ""
    """How the policy came to it: "forecast", "two_phase", "exploration"; empty where nothing is priced."""
    unfit: str = ""
    """Why it is not chosen whatever its score, such as a deadline that it would miss."""
    delay_of_others_s: float = 0.0
    """Part of the score: how much later others finish, by weight."""
    delay_of_last_s: float = 0.0
    """Likewise: how much later the last request of all finishes."""
    weights: tuple[float, float, float] = (1.0, 0.0, 0.0)
    """score_s = these times its own finish, `delay_of_others_s` and `delay_of_last_s`."""
    load: Load | None = None
    """The candidate's books, with what is likely to come, as they were played forward;"""
    own: Job | None = None
    """and the request as it was put into them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer."""

    selected: str
    """Empty when the policy wants none of the candidates."""
    prices: Mapping[str, Price]
    """By candidate name; one without a price may be missing."""
    reason: str
    """One sentence without a full stop."""
    retry_after_s: float | None = None
    """Set when candidates are there but none is good enough now: when it may be worth asking again."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A backend that was no candidate."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Everything that went into one decision; Route, the log, the span and WatchDecisions all show this."""

    id: str
    time: datetime.datetime
    """Aware, UTC."""
    policy: str
    request: RoutingRequest
    candidates: Sequence[Candidate]
    exclusions: Sequence[Exclusion]
    choice: Choice
    probe_s: float
    choose_s: float
    """Scores, choice and booking."""
    attempt: int
    """Counts from 1; later ones follow a failure."""
    not_shortlisted: int = 0
    """Eligible backends of a wide fleet that were not looked at any closer."""

    @property
    def selected(self) -> str:
        """The chosen backend; empty when nobody could take the request."""
        return self.choice.selected

    @property
    def price(self) -> Price:
        """Of the chosen backend."""
        return self.choice.prices.get(self.selected, Price())

    def to_proto(self) -> router_pb2.Decision:
        """The wire form: candidates first, then the backends that were none."""
        message = router_pb2.Decision(
            id=self.id,
            policy=self.policy,
            max_new_tokens=self.request.max_new_tokens,
            workload=self.request.workload,
            candidates=[self._candidate_proto(candidate) for candidate in self.candidates],
            selected=self.selected,
            reason=self.choice.reason,
            probe_s=self.probe_s,
            choose_s=self.choose_s,
            attempt=self.attempt,
            not_shortlisted=self.not_shortlisted,
            generated_tokens=self.request.generated_tokens,
        )
        message.candidates.extend(
            router_pb2.Candidate(backend=exclusion.name, excluded=exclusion.why) for exclusion in self.exclusions
        )
        message.time.FromDatetime(self.time)
        return message

    def _candidate_proto(self, candidate: Candidate) -> router_pb2.Candidate:
        price = self.choice.prices.get(candidate.name, Price())
        message = router_pb2.Candidate(
            backend=candidate.name,
            active=candidate.active,
            queued=candidate.queued,
            prompt_tokens=candidate.prompt_tokens,
            prompt_tokens_estimated=candidate.prompt_tokens_estimated,
            reusable_tokens=candidate.reusable_tokens,
            probe=f"PROBE_OUTCOME_{candidate.probe.name}",
            prefill_tokens=candidate.prefill_tokens,
            decode_tokens=candidate.decode_tokens(self.request.max_new_tokens),
            score_s=price.score_s,
            predicted_ttft_s=price.predicted_ttft_s,
            status_age_s=candidate.status_age_s,
            precision=candidate.precision,
            predicted_finish_s=price.predicted_finish_s,
            priced_by=price.priced_by,
            unfit=price.unfit,
            forecast=None
            if price.load is None or price.own is None
            else forecast_to_proto(
                price.load,
                price.own,
                delay_of_others_s=price.delay_of_others_s,
                delay_of_last_s=price.delay_of_last_s,
                weights=price.weights,
            ),
        )
        if candidate.rates is not None:
            message.isolated_rates.CopyFrom(
                inference_pb2.IsolatedRates(
                    prefill_tokens_per_s=candidate.rates.prefill_tokens_per_s,
                    decode_tokens_per_s=candidate.rates.decode_tokens_per_s,
                )
            )
        return message

    def log_fields(self) -> dict[str, object]:
        """One structured log line: the candidate table and the selection."""
        return {
            "decision": self.id,
            "attempt": self.attempt,
            "policy": self.policy,
            "selected": self.selected,
            "reason": self.choice.reason,
            "max_new_tokens": self.request.max_new_tokens,
            "generated_tokens": self.request.generated_tokens,
            "workload": self.request.workload,
            "probe_ms": round(1e3 * self.probe_s, 3),
            "choose_ms": round(1e3 * self.choose_s, 3),
            "candidates": [self._candidate_row(candidate) for candidate in self.candidates],
            "excluded": {exclusion.name: exclusion.why for exclusion in self.exclusions},
        }

    def _candidate_row(self, candidate: Candidate) -> dict[str, object]:
        score_s = self.choice.prices.get(candidate.name, Price()).score_s
        return {
            "backend": candidate.name,
            "active": candidate.active,
            "queued": candidate.queued,
            "prefill_tokens": candidate.prefill_tokens,
            "decode_tokens": candidate.decode_tokens(self.request.max_new_tokens),
            "reusable_tokens": candidate.reusable_tokens,
            "probe": candidate.probe.value,
            "score_s": None if score_s is None else round(score_s, 3),
        }
