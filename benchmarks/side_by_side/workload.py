"""What is sent to both servers, and when. Pure: the same label gives the same requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PREFIX_TOKENS = 496
OWN_TOKENS = 20
BURST_REQUESTS = 8
BURST_GAP_S = 0.05
BURST_NEW_TOKENS = 128
SLOTS = 4
KV_TOKENS = SLOTS * 2048
"""KV cache of either server: as much as holds the prompt of `long` where every slot has cells of its own."""
CHURN_KV_TOKENS = SLOTS * 512
"""For `churn`, a server of its own: the larger cache would take minutes to fill."""

_FIRST_ID, _END_ID = 1000, 41_000
"""Ids of ordinary text in the packaged model's vocabulary of 49,152."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: greedy, to exactly `new_tokens`."""

    prompt: tuple[int, ...]
    new_tokens: int
    after_s: float = 0.0
    """When it is sent, from the start of its group."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Three groups of requests, of which one is measured."""

    measured: tuple[Ask, ...]
    before: tuple[Ask, ...] = ()
    """Answered before anything is measured."""
    beside: tuple[Ask, ...] = ()
    """Decoding when the measured ones are sent, cancelled when those are answered."""
    in_flight: int | None = None
    """Most requests of a group that wait for an answer at a time; None: all."""
    kv_tokens: int = KV_TOKENS
    """KV cache of the server it runs on."""


def token_ids(label: str, count: int) -> tuple[int, ...]:
    """Random ids of ordinary text, fixed by the label."""
    draw = random.Random(label)
    return tuple(draw.randrange(_FIRST_ID, _END_ID) for _ in range(count))


def burst(label: str, prefix: tuple[int, ...]) -> tuple[Ask, ...]:
    """Eight requests 50 ms apart that share a prefix."""
    return tuple(
        Ask(prefix + token_ids(f"{label} own {index}", OWN_TOKENS), BURST_NEW_TOKENS, index * BURST_GAP_S)
        for index in range(BURST_REQUESTS)
    )


def single(label: str) -> Workload:
    """One stream, alone."""
    return Workload((Ask(token_ids(label, 32), 128),))


def steady(label: str) -> Workload:
    """The burst, its prefix known to every slot."""
    prefix = token_ids(label, PREFIX_TOKENS)
    return Workload(burst(label, prefix), before=(Ask(prefix, 1),) * SLOTS)


def seen_once(label: str) -> Workload:
    """The burst, its prefix sent once before."""
    prefix = token_ids(label, PREFIX_TOKENS)
    return Workload(burst(label, prefix), before=(Ask(prefix, 1),))


def cold(label: str) -> Workload:
    """Eight times the same new prompt, at once."""
    return Workload((Ask(token_ids(label, PREFIX_TOKENS + OWN_TOKENS), 32),) * BURST_REQUESTS)


def churn(label: str) -> Workload:
    """Prompts that together need 1.5 times the KV cache, visited in turn, two at a time; the second visits count."""
    visit_tokens, answer_tokens = 256, 8
    visits = tuple(
        Ask(token_ids(f"{label} {index}", visit_tokens - answer_tokens), answer_tokens)
        for index in range(3 * CHURN_KV_TOKENS // (2 * visit_tokens))
    )
    return Workload(measured=visits, before=visits, in_flight=2, kv_tokens=CHURN_KV_TOKENS)


def long(label: str) -> Workload:
    """A prompt of 2,000 tokens that arrives while three streams decode."""
    streams = tuple(Ask(token_ids(f"{label} beside {index}", 32), 1900) for index in range(SLOTS - 1))
    return Workload((Ask(token_ids(label, 2000), 16),), beside=streams)


WORKLOADS: Mapping[str, Callable[[str], Workload]] = {
    make.__name__: make for make in (churn, single, steady, seen_once, cold, long)
}
"""By name, in the order they run: from a label to the requests. `long` is last because what its cancelled streams leave
behind must not meet another workload."""
