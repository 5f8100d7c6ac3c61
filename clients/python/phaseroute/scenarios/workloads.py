"""Kinds of requests, and a mixture of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from phaseroute.scenarios.bounds import Bounded, bounded
from phaseroute.scenarios.lengths import Lengths

LEAST_PROMPT_TOKENS = 2
LONGEST_LIMIT_S = 86_400.0


class Streams:
    """Independent streams of random numbers, one for each thing that is drawn: what is drawn of one is the same
    whatever is drawn of the others."""

    def __init__(self, seed: int) -> None:
        self.arrivals = _stream(seed, "arrivals")
        self.workloads = _stream(seed, "workloads")
        self.prompts = _stream(seed, "prompts")
        self.budgets = _stream(seed, "budgets")
        self.answers = _stream(seed, "answers")
        self.prefixes = _stream(seed, "prefixes")


@dataclass(frozen=True, slots=True)
class Size:
    """Of one request."""

    prompt_tokens: int
    max_new_tokens: int
    new_tokens: int
    """Up to max_new_tokens; equal to it where the answer is to ignore the model's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(Bounded):
    """One kind of requests."""

    label: str = ""
    weight: float = bounded(1e-6, 1e6, default=1.0)
    """Its share is this over the sum of all."""
    prompts: Lengths
    budgets: Lengths
    """What an answer may come to, max_new_tokens."""
    answers: Lengths | None = None
    """What it comes to by itself; None: exactly to its budget. Drawn apart from the budget, and cut off one token below
    it, since an answer that has its whole budget counts as one that ignores the model's end."""
    batch: bool = False
    deadline_s: float | None = None
    ttft_slo_s: float | None = None

    def draw(self, streams: Streams) -> Size:
        """The next request's."""
        prompt_tokens = max(LEAST_PROMPT_TOKENS, self.prompts.draw(streams.prompts))
        budget = self.budgets.draw(streams.budgets)
        if self.answers is None:
            return Size(prompt_tokens, budget, budget)
        return Size(prompt_tokens, budget, max(1, min(budget - 1, self.answers.draw(streams.answers))))


def draw_workload(workloads: Sequence[Workload], streams: Streams) -> Workload:
    """One of them, by weight."""
    if len(workloads) == 1:
        return workloads[0]
    return streams.workloads.choices(workloads, [workload.weight for workload in workloads])[0]


def _stream(seed: int, name: str) -> random.Random:
    return random.Random(f"{seed}/{name}")
