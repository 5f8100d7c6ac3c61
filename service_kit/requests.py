"""A GenerateRequest taken off the wire: checked once, then a frozen value that the rest of the code trusts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from phaseroute.v1 import inference_pb2 as pb
from service_kit.faults import InvalidRequest

DEFAULT_MAX_NEW_TOKENS = 256
"""Used when a request names none. Router and backend must agree on it, since both price it."""
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_LABEL_BYTES = 256
"""Longest workload, model, policy, backend or precision: they end up in logs, spans and metadata."""
MAX_TEMPERATURE = 5.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_TOP_K = 1_000_000
PENALTY_WINDOW_TOKENS = 64
"""Part of the contract: how far back penalties see, prompt included."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's chat template; at least one."""

    turns: tuple[ChatTurn, ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids of the served model's vocabulary; at least one, range checked by the backend."""

    ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw the next token; the defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: every token."""
    min_p: float = 0.0
    seed: int | None = None
    """None: random."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def greedy(self) -> bool:
        """The most likely token every time."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """What the last `PENALTY_WINDOW_TOKENS` tokens were counts."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


class Priority(Enum):
    """Who waits for whom under a scheduling policy that heeds it; the values are the wire's."""

    INTERACTIVE = pb.PRIORITY_INTERACTIVE
    """Somebody watches the answer come."""
    BATCH = pb.PRIORITY_BATCH
    """Nobody does."""


@dataclass(frozen=True, slots=True)
class RoutingHints:
    """What a client asks of the router."""

    policy: str = ""
    backend: str = ""
    excluded: frozenset[str] = frozenset()
    precision: str = ""
    """How a backend must hold the weights; empty: in any way."""
    ttft_slo_s: float | None = None
    """Longest acceptable time to the first token; None: any."""


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """A valid request. Token ids and context length still need the model to be checked."""

    prompt: Prompt
    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    priority: Priority
    workload: str
    model: str
    routing: RoutingHints
    attempt_id: str
    """Empty when no router sent this."""
    reusable_tokens: int | None
    """The router's estimate, None without a router."""
    generated: tuple[int, ...] = ()
    """The beginning of the answer, which a backend that was lost since has generated; fewer than or as many as
    `max_new_tokens`."""
    client: str = ""
    """Whose request a router says that this is; empty without a router, or when it does not know."""
    client_weight: float | None = None
    """Of the client's share, as a router says it."""
    cache_salt: str = ""
    """As a router has it: prompts share a cache only where this is equal."""


def parse_generate(request: pb.GenerateRequest) -> GenerateSpec:
    """Check everything that can be checked without a model. Raises `InvalidRequest`."""
    max_new_tokens = request.max_new_tokens if request.HasField("max_new_tokens") else DEFAULT_MAX_NEW_TOKENS
    if max_new_tokens < 1:
        raise InvalidRequest(
            "max_new_tokens",
            f"is {max_new_tokens}; ask for at least 1 token, or leave it out for {DEFAULT_MAX_NEW_TOKENS}",
        )
    attempt = request.attempt if request.HasField("attempt") else None
    if attempt and len(attempt.generated_token_ids) > max_new_tokens:
        raise InvalidRequest(
            "attempt.generated_token_ids",
            f"has {len(attempt.generated_token_ids)} ids, more than max_new_tokens of {max_new_tokens}; the answer was "
            "complete before",
        )
    return GenerateSpec(
        prompt=parse_prompt(request.prompt),
        max_new_tokens=max_new_tokens,
        sampling=_sampling(request.sampling),
        stop=_stop(request.stop),
        ignore_eos=request.ignore_eos,
        priority=_priority(request.priority),
        workload=_label("workload", request.workload),
        model=_label("model", request.model),
        routing=RoutingHints(
            policy=_label("routing.policy", request.routing.policy),
            backend=_label("routing.backend", request.routing.backend),
            excluded=frozenset(_label("routing.excluded_backends", name) for name in request.routing.excluded_backends),
            precision=_label("routing.precision", request.routing.precision),
            ttft_slo_s=_ttft_slo(request.routing),
        ),
        attempt_id=_label("attempt.id", attempt.id) if attempt else "",
        reusable_tokens=attempt.reusable_tokens if attempt and attempt.HasField("reusable_tokens") else None,
        generated=tuple(attempt.generated_token_ids) if attempt else (),
        client=_label("attempt.client", attempt.client) if attempt else "",
        client_weight=_client_weight(attempt) if attempt else None,
        cache_salt=_label("attempt.cache_salt", attempt.cache_salt) if attempt else "",
    )


def parse_prompt(prompt: pb.Prompt) -> Prompt:
    """The prompt in the one form it was given in. Raises `InvalidRequest` when it is empty."""
    match prompt.WhichOneof("input"):
        case "text":
            if not prompt.text:
                raise InvalidRequest("prompt.text", "is empty; send at least one character")
            return TextPrompt(prompt.text)
        case "chat":
            return ChatPrompt(_turns(prompt.chat.messages))
        case "token_ids":
            if not prompt.token_ids.ids:
                raise InvalidRequest("prompt.token_ids", "is empty; send at least one token id")
            return TokenPrompt(tuple(prompt.token_ids.ids))
        case _:
            raise InvalidRequest("prompt", "is missing; set one of text, chat or token_ids")


def _turns(messages: Sequence[pb.ChatMessage]) -> tuple[ChatTurn, ...]:
    if not messages:
        raise InvalidRequest("prompt.chat.messages", "is empty; send at least one message")
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest(f"prompt.chat.messages[{index}].role", 'is empty; use "system", "user" or "assistant"')
    if not any(message.content for message in messages):
        raise InvalidRequest("prompt.chat.messages", "have no content; write something in at least one of them")
    return tuple(ChatTurn(message.role, message.content) for message in messages)


def _sampling(wire: pb.Sampling) -> Sampling:
    chosen = {name: getattr(wire, name) for name in Sampling.__dataclass_fields__ if wire.HasField(name)}
    sampling = Sampling(**chosen)
    _within("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)
    _within("top_p", sampling.top_p, 0.0, 1.0, low_open=True)
    _within("top_k", sampling.top_k, 0, MAX_TOP_K)
    _within("min_p", sampling.min_p, 0.0, 1.0, high_open=True)
    _within("repetition_penalty", sampling.repetition_penalty, 0.0, MAX_REPETITION_PENALTY, low_open=True)
    _within("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    return sampling


def _priority(number: int) -> Priority:
    if number == pb.PRIORITY_UNSPECIFIED:
        return Priority.INTERACTIVE
    try:
        return Priority(number)
    except ValueError:
        known = ", ".join(f"{pb.Priority.Name(each.value)} ({each.value})" for each in Priority)
        raise InvalidRequest("priority", f"is {number}; use {known}, or leave it out for interactive") from None


def _within(
    name: str, value: float, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> None:
    above = value > low if low_open else value >= low
    below = value < high if high_open else value <= high
    if math.isnan(value) or not (above and below):
        left, right = "(" if low_open else "[", ")" if high_open else "]"
        raise InvalidRequest(f"sampling.{name}", f"is {value:g}; choose a value in {left}{low:g}, {high:g}{right}")


def _stop(strings: Sequence[str]) -> tuple[str, ...]:
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"has {len(strings)} strings; send at most {MAX_STOP_STRINGS}")
    for index, string in enumerate(strings):
        if not string:
            raise InvalidRequest(f"stop[{index}]", "is empty and would end every answer at once; leave it out")
        if len(string.encode()) > MAX_STOP_BYTES:
            raise InvalidRequest(f"stop[{index}]", f"is longer than {MAX_STOP_BYTES} bytes; shorten it")
    return tuple(strings)


def _ttft_slo(routing: pb.RoutingHints) -> float | None:
    if not routing.HasField("ttft_slo_s"):
        return None
    if not 0 < routing.ttft_slo_s < math.inf:
        raise InvalidRequest(
            "routing.ttft_slo_s", f"is {routing.ttft_slo_s:g}; give seconds above 0, or leave it out for any"
        )
    return routing.ttft_slo_s


def _client_weight(attempt: pb.Attempt) -> float | None:
    if not attempt.HasField("client_weight"):
        return None
    if not 0 < attempt.client_weight < math.inf:
        raise InvalidRequest(
            "attempt.client_weight", f"is {attempt.client_weight:g}; give a number above 0, or leave it out for 1"
        )
    return attempt.client_weight


def _label(field: str, value: str) -> str:
    if len(value.encode()) > MAX_LABEL_BYTES:
        raise InvalidRequest(field, f"is longer than {MAX_LABEL_BYTES} bytes; use a short name")
    return value
