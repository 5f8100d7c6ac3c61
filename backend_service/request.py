"""One request's life on a backend: queued, prefill, decode, ended."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from backend_service.engines.base import Admission
from backend_service.prefix_index import PACKED
from backend_service.text import TextStream
from service_kit.faults import Fault
from service_kit.requests import Priority, Sampling


class Phase(Enum):
    """Where a request is; it only moves forward."""

    QUEUED = auto()
    PREFILL = auto()
    DECODE = auto()
    ENDED = auto()


class FinishReason(Enum):
    """Why generation ended without an error."""

    EOS = auto()
    LENGTH = auto()
    STOP = auto()


@dataclass(frozen=True, slots=True)
class Times:
    """Moments on the scheduler's clock, in seconds."""

    submitted_s: float
    admitted_s: float
    first_token_s: float
    last_token_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """New tokens of a request; the text may lag behind the ids."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a request that came to its end."""

    request_id: str
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    times: Times


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that could not be finished."""

    request_id: str
    fault: Fault


Event = Progress | Ended | Failed


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as Status shows it."""

    id: str
    phase: Phase
    priority: Priority
    remaining_prefill_tokens: int
    remaining_decode_tokens: int
    generated_tokens: int
    context_tokens: int
    prompt_tokens: int
    cached_tokens: int
    """What was there of the prompt when it was admitted."""
    due_s: float
    """When it is due for admission, on the clock of the order of admission."""
    workload: str
    ignore_eos: bool
    client: str


@dataclass(slots=True, eq=False)
class Request:
    """What was asked, and how far it is. Owned by the scheduler's thread once submitted."""

    id: str
    """Unique among the requests in the scheduler."""
    tokens: Sequence[int]
    """The prompt, then what an earlier attempt generated of the answer."""
    max_new_tokens: int
    """Of the whole answer."""
    sampling: Sampling
    ignore_eos: bool
    text: TextStream
    eos: frozenset[int]
    reusable_estimate: int
    """The prefix found reusable when the request was routed; what Status subtracts while it waits."""
    submitted_s: float
    priority: Priority = Priority.INTERACTIVE
    workload: str = ""
    """A label that only Status shows."""
    resumed_tokens: int = 0
    """So many of the last `tokens` are of the answer; fewer than `max_new_tokens`."""
    client: str = ""
    """Whose it is; empty: nobody's in particular."""
    weight: float = 1.0
    """Of its client, where the order of admission is fair between clients; above 0."""
    cache_salt: str = ""
    """Prompts share a cache only where this is equal."""

    packed: array[int] = field(init=False)
    """`tokens`, for fast comparison."""
    phase: Phase = field(default=Phase.QUEUED, init=False)
    due_s: float = field(init=False)
    """When it is due for admission, on the clock of the line that it waits in, which sets it."""
    held_s: float | None = field(default=None, init=False)
    """Since when it waits for a prefix that another request is computing."""
    handle: int = field(default=-1, init=False)
    """The engine's name for it while it is active."""
    cached_tokens: int = field(default=0, init=False)
    """Of the prompt alone."""
    computed_tokens: int = field(default=0, init=False)
    """Known tokens in the KV cache, shared ones included."""
    generated_tokens: int = field(init=False)
    """Of the whole answer, earlier attempts included."""
    admitted_s: float = field(default=0.0, init=False)
    first_token_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.packed = array(PACKED, self.tokens)
        self.due_s = self.submitted_s
        self.generated_tokens = self.resumed_tokens

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt alone."""
        return len(self.tokens) - self.resumed_tokens

    @property
    def pending_tokens(self) -> int:
        """Known tokens that are not computed yet: 1 for a decode row, what is left of the prompt before that."""
        return self.prompt_tokens + self.generated_tokens - self.computed_tokens

    @property
    def remaining_prefill_tokens(self) -> int:
        """Still to be computed before its next token, as far as is known: of the prompt and of what an earlier attempt
        generated."""
        if self.phase is Phase.QUEUED:
            return len(self.tokens) - self.reusable_estimate
        return max(0, len(self.tokens) - self.computed_tokens)

    @property
    def remaining_decode_tokens(self) -> int:
        """The decode budget that is left."""
        return self.max_new_tokens - self.generated_tokens

    def view(self) -> RequestView:
        """How it stands now."""
        return RequestView(
            id=self.id,
            phase=self.phase,
            priority=self.priority,
            remaining_prefill_tokens=self.remaining_prefill_tokens,
            remaining_decode_tokens=self.remaining_decode_tokens,
            generated_tokens=self.generated_tokens,
            context_tokens=self.computed_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            due_s=self.due_s,
            workload=self.workload,
            ignore_eos=self.ignore_eos,
            client=self.client,
        )

    def admit(self, admission: Admission, now_s: float) -> None:
        """QUEUED -> PREFILL."""
        self.phase = Phase.PREFILL
        self.handle = admission.handle
        self.computed_tokens = admission.reused_tokens
        self.cached_tokens = min(admission.reused_tokens, self.prompt_tokens)
        self.admitted_s = now_s

    def accept(self, token: int, now_s: float) -> list[Event]:
        """Take a sampled token: PREFILL -> DECODE at the first, -> ENDED at the last."""
        if self.phase is Phase.PREFILL:
            self.phase = Phase.DECODE
            self.first_token_s = now_s
        if token in self.eos and not self.ignore_eos:
            return self._end(FinishReason.EOS, now_s)
        self.generated_tokens += 1
        shown = self.text.feed(token)
        if self.text.stopped:
            return self._end(FinishReason.STOP, now_s, shown, token)
        if self.generated_tokens == self.max_new_tokens:
            return self._end(FinishReason.LENGTH, now_s, shown, token)
        return [Progress(self.id, shown, (token,))]

    def _end(self, reason: FinishReason, now_s: float, shown: str = "", *last: int) -> list[Event]:
        """What was held back comes with the last token: who has that token has the whole answer, also where the end of
        the stream is lost."""
        self.phase = Phase.ENDED
        text = shown + self.text.flush()
        if self.text.stopped:  # what looked like the start of a longer stop string may only now be a whole shorter one
            reason = FinishReason.STOP
        ended = Ended(
            self.id,
            reason,
            self.prompt_tokens,
            self.cached_tokens,
            self.generated_tokens,
            Times(self.submitted_s, self.admitted_s, self.first_token_s, now_s),
        )
        return [Progress(self.id, text, last), ended] if text or last else [ended]
