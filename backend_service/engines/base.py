"""The plug between the scheduler and whatever computes tokens: six methods.

An engine holds sequences. Each has known tokens (the prompt, then what was sampled) of which the first few are
computed, that is, in the KV cache. Prefill and decode are the same thing to it: a slice asks for the next n known
tokens to be computed, and when that reaches the last known one, a new token is sampled and becomes known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service_kit.requests import Prompt, Sampling


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What token ids stand for."""

    pieces: Sequence[bytes]
    """The bytes of each token; empty for control tokens. May cut characters in half."""
    eos: frozenset[int]
    """Tokens with which the model ends its answer."""

    @property
    def size(self) -> int:
        """Valid token ids are 0 .. size-1."""
        return len(self.pieces)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What stays the same for an engine's whole life."""

    name: str
    device: str
    """For people, such as "CPU, 1 thread, cpus 0"."""
    simulated: bool
    model_name: str
    model_fingerprint: str
    """Of the weights' origin: the file or files that they were taken from, before any conversion."""
    tokenizer_fingerprint: str
    """Of what the tokenizer does: equal means the same token ids for the same text."""
    precision: str
    """How the weights are held, such as "q4_1", "q4_1 as f32" or "bf16"."""
    context_tokens: int
    """Largest prompt + new tokens of one request."""
    max_step_tokens: int
    """Largest sum of slice tokens in one step."""
    vocabulary: Vocabulary
    shares_prefixes: bool = True
    """What one sequence computed may be reused by another with the same first tokens."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """KV cache accounting, in tokens."""

    capacity_tokens: int
    used_tokens: int
    """Shared cells counted once; retained ones included."""
    retained_tokens: int
    """Held only by released sequences; given up on demand."""
    reserved_tokens: int
    """What the live sequences may still add."""
    host_tokens: int = 0
    """Copied to host memory, restored on demand."""
    host_capacity_tokens: int = 0
    """0: nothing is copied."""
    padded: bool = False
    """A batch takes as many tokens as it has sequences, times the longest of them at its worst."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that has its worst case of KV cache reserved."""

    handle: int
    """Names the sequence until it is released; reused afterwards."""
    reused_tokens: int
    """Leading prompt tokens that are computed already; at most len(tokens) - 1."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Compute the next `tokens` known tokens of a sequence."""

    handle: int
    tokens: int
    guesses: int = 0
    """Of a slice that reaches the last known token: an engine that can guess (speculative decoding) may compute up to
    this many guessed tokens after it and keep those that it would have sampled anyway."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, by handle."""

    tokens: Mapping[int, Sequence[int]]
    """What was sampled for each slice that reached the last known token: one token, and one more for each guess that
    was right. All but the last of them are computed."""
    guesses: Mapping[int, int] = field(default_factory=dict)
    """Guessed tokens that were computed, right or wrong; absent for none."""
    steps: int = 1
    """Pure decode steps, one after the other, that this was. Above 1 only in virtual time, where the simulated engine
    may leap over steps in which nothing else can happen; then each row has so many tokens."""


class Engine(Protocol):
    """Raises `EngineFailed` from `step` when the computation broke: then every live sequence is gone and released, and
    the engine is ready for new ones."""

    info: EngineInfo

    def prepare(self, prompt: Prompt, cache_salt: str = "") -> Sequence[int]:
        """Token ids of a prompt, at least one. Any thread. Raises `InvalidRequest`. Whoever remembers them does so by
        salt, or the time that this takes would tell what others have sent."""

    def probe(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Leading tokens that `admit` could reuse now, at most len(tokens) - 1. Any thread; changes nothing and does
        not wait for a step."""

    def admit(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        *,
        ignore_eos: bool,
        generated: int = 0,
        cache_salt: str = "",
    ) -> Admission | None:
        """Start a sequence, or None while its worst case (tokens + max_new_tokens - shared prefix) does not fit beside
        the live sequences. Engine thread.

        `generated`: so many of the last `tokens` were sampled already, in an attempt that was lost; what is drawn goes
        on as if it had not been. `max_new_tokens` is what may still come. Only sequences of one `cache_salt` share what
        they computed.
        """

    def step(self, slices: Sequence[Slice]) -> StepResult:
        """Compute the slices in one batch. Returns when the results are there. Engine thread."""

    def release(self, handle: int, *, retain: bool) -> None:
        """End a sequence; with `retain`, what it computed stays reusable as long as there is room. Engine thread."""

    def stats(self) -> KvUse:
        """KV cache use now. Engine thread."""
