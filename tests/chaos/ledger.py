"""The exact books of a chaos run: each request ends once, with its own answer or with a status that is right for it."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from phaseroute.v1 import inference_pb2 as pb
from tests.chaos.reference import Answer
from tests.chaos.workload import PlannedRequest

DEADLINE_SLACK_S = 0.1
"""Two clocks and one event loop: how much earlier than planned a deadline may be seen to pass."""


class RouterTrouble(enum.Enum):
    """What happened to the router while a request was out."""

    NONE = "none"
    RESTART = "restart"
    """It was told to stop: what it had taken on must end well, new requests are refused."""
    KILLED = "killed"
    """It was killed: nobody can go on with what it relayed."""


class Outcome(enum.Enum):
    """How a request ended."""

    ANSWERED = "answered"
    CANCELLED = "cancelled"
    """By its client."""
    LATE = "late"
    """Its deadline passed."""
    DECLINED = "declined"
    """At once: no backend would have kept its deadline."""
    INTERRUPTED = "interrupted"
    """The router was killed under it."""
    RESEND = "resend"
    """Refused by a router that is going or gone, before anything came: its client sends it again."""
    BROKEN = "broken"
    """Against the promise."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a client has when its call is over."""

    code: str
    """A gRPC status code's name; HUNG where there was none in time."""
    message: str
    token_ids: tuple[int, ...]
    text: str
    finished: pb.Finished | None
    after_last: int
    """Messages that came after the last message."""
    began_s: float
    ended_s: float
    longest_gap_s: float
    """Between two messages, or the sending and the first."""
    retry_info: bool = False
    """The status says when to come again."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An ending, judged."""

    outcome: Outcome
    problem: str = ""
    """What is wrong, for Outcome.BROKEN; nothing of a prompt or an answer."""


def judge(planned: PlannedRequest, answer: Answer, ending: Ending, trouble: RouterTrouble) -> Verdict:
    """Compare an ending with what was promised."""
    if problem := _difference(answer, ending):
        return Verdict(Outcome.BROKEN, problem)
    match ending.code:
        case "OK":
            return Verdict(Outcome.ANSWERED)
        case "CANCELLED" if planned.gives_up:
            return Verdict(Outcome.CANCELLED)
        case "DEADLINE_EXCEEDED" if planned.deadline_s is not None:
            early_s = planned.deadline_s - (ending.ended_s - ending.began_s)
            if early_s > DEADLINE_SLACK_S:
                return Verdict(Outcome.BROKEN, f"its deadline was said to have passed {early_s:.2f} s before it did")
            return Verdict(Outcome.LATE)
        case "RESOURCE_EXHAUSTED" if planned.deadline_s is not None and not ending.token_ids:
            if not ending.retry_info:
                return Verdict(Outcome.BROKEN, f"declined without RetryInfo: {ending.message}")
            return Verdict(Outcome.DECLINED)
        case "UNAVAILABLE" if trouble is not RouterTrouble.NONE and not ending.token_ids:
            return Verdict(Outcome.RESEND)
        case "UNAVAILABLE" if trouble is RouterTrouble.KILLED:
            return Verdict(Outcome.INTERRUPTED)
    return Verdict(Outcome.BROKEN, f"{ending.code} after {len(ending.token_ids)} tokens: {ending.message}")


def _difference(answer: Answer, ending: Ending) -> str:
    """How what came differs from the undisturbed answer; an unfinished one must be a beginning of it."""
    got, due = ending.token_ids, answer.token_ids
    if got != due[: len(got)]:
        at = next((index for index, pair in enumerate(zip(got, due, strict=False)) if pair[0] != pair[1]), len(due))
        return f"token {at} of {len(due)} is wrong, or there are too many: {len(got)} came"
    if not answer.text.startswith(ending.text):
        return f"the text is not the tokens' own, {len(ending.text)} characters after {len(got)} tokens"
    if ending.after_last:
        return f"{ending.after_last} messages came after the last one"
    if ending.code != "OK":
        return ""
    last = ending.finished
    if last is None:
        return "the stream ended well, without its last message"
    if (got, ending.text) != (due, answer.text):
        return f"the answer ends after {len(got)} of {len(due)} tokens"
    wanted = (answer.finish_reason, answer.prompt_tokens, len(due))
    told = (last.finish_reason, last.usage.prompt_tokens, last.usage.generated_tokens)
    if told != wanted:
        return f"finish reason, prompt and new tokens are {told}, should be {wanted}"
    return ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that is over."""

    planned: PlannedRequest
    ending: Ending
    verdict: Verdict
    resent: int
    """How often it was sent again before."""

    @property
    def continuations(self) -> int:
        """How often its answer went on elsewhere; known of complete answers only."""
        return 0 if self.ending.finished is None else self.ending.finished.routing.continuations

    @property
    def attempts(self) -> int:
        """As the router counts them; known of complete answers only."""
        return 1 if self.ending.finished is None else self.ending.finished.routing.attempts

    def to_json(self) -> str:
        """One line of a log, on the same clock as the faults'; nothing of prompt or answer."""
        routing = None if self.ending.finished is None else self.ending.finished.routing
        return json.dumps(
            {
                "index": self.planned.index,
                "client": self.planned.client,
                "outcome": self.verdict.outcome.value,
                "problem": self.verdict.problem,
                "code": self.ending.code,
                "tokens": len(self.ending.token_ids),
                "began_s": round(self.ending.began_s, 3),
                "ended_s": round(self.ending.ended_s, 3),
                "longest_gap_s": round(self.ending.longest_gap_s, 3),
                "backend": routing and routing.backend,
                "attempts": self.attempts,
                "continuations": self.continuations,
                "resent": self.resent,
            }
        )


class Ledger:
    """Who was sent, and how each ended."""

    def __init__(self) -> None:
        self._open: dict[int, PlannedRequest] = {}
        self.entries: dict[int, Entry] = {}
        self.problems: list[str] = []

    def open(self, planned: PlannedRequest) -> None:
        """It is about to be sent for the first time."""
        if planned.index in self._open or planned.index in self.entries:
            self.problems.append(f"request {planned.index} was sent twice")
        self._open[planned.index] = planned

    def close(self, entry: Entry) -> None:
        """It is over."""
        index = entry.planned.index
        if self._open.pop(index, None) is None:
            self.problems.append(f"request {index} ended twice")
        self.entries[index] = entry
        if entry.verdict.outcome is Outcome.BROKEN:
            self.problems.append(f"request {index} ({entry.planned.client}): {entry.verdict.problem}")

    @property
    def lost(self) -> Iterable[int]:
        """Sent, and never over."""
        return self._open.keys()

    def outcomes(self) -> Counter[Outcome]:
        """How many ended how."""
        return Counter(entry.verdict.outcome for entry in self.entries.values())
