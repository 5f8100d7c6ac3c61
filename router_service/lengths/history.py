"""Answers become as long as earlier ones to prompts of the same kind and size did."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from router_service.lengths.base import LengthOutcome, LengthQuery
from router_service.lengths.survival import TO_THE_BUDGET, Survival

WINDOW_ANSWERS = 256
"""The latest of each group count, all alike."""
PRIOR_ANSWERS = 2.0
"""What the wider group's distribution weighs beside a group's own answers."""
MAX_GROUPS = 512
"""Clients choose labels. Beyond this, the group that had no answer for longest is forgotten."""
LONGEST_PROMPT_CLASS = 20
"""From 2^19 tokens on, prompts are of one class."""

YOUNG_ANSWERS = 64
"""Up to so many in its class, each answer counts at once;"""
REFRESH_ANSWERS = 8
"""later it is one of hundreds, and so many are counted together: what was worked out by callers stays good as long."""
_ANY_PROMPT = -1
"""In place of a class of prompt lengths: all of a workload."""


class History:
    """For each workload and class of prompt lengths (powers of two), the distribution of the latest 256 answers.

    A group's prior is the next wider one's distribution: class, workload, all requests, and at last that answers run to
    their budget. So a new group is priced as its workload is, and the very first request at its budget. State is in
    memory only, and bounded.
    """

    name = "history"

    def __init__(self) -> None:
        self.version = 0
        self._all = _Group()
        self._groups: OrderedDict[tuple[str, int], _Group] = OrderedDict()
        """By workload and prompt class; the latest that had an answer is last."""
        self._survivals: dict[tuple[str, int], Survival] = {}
        """What was asked for since the last answer."""
        self._survival_of_all: Survival | None = None

    def expected(self, query: LengthQuery) -> float:
        """The mean of what earlier answers came to, given that they became longer than `generated_tokens`."""
        generated, budget = query.generated_tokens, query.max_new_tokens
        if query.ignore_eos or budget - generated <= 1:
            return float(query.budget_tokens)
        key = (query.workload, _prompt_class(query.prompt_tokens))
        survival = self._survivals.get(key)
        if survival is None:
            survival = self._survival(key)
        return survival.remaining(generated, budget)

    def observe(self, outcome: LengthOutcome) -> None:
        """Count an answer in its class, its workload and among all."""
        length, ended = outcome.length_tokens, outcome.ended
        self._all.add(length, ended)
        for prompt_class in (_ANY_PROMPT, _prompt_class(outcome.prompt_tokens)):
            key = (outcome.workload, prompt_class)
            self._groups.setdefault(key, _Group()).add(length, ended)
            self._groups.move_to_end(key)
        while len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        answers = self._groups[key].answers
        if answers <= YOUNG_ANSWERS or answers % REFRESH_ANSWERS == 0:
            self._survivals.clear()
            self._survival_of_all = None
            self.version += 1

    def _survival(self, key: tuple[str, int]) -> Survival:
        """Of the narrowest group that is known. Kept for known groups only: anybody may ask for any label."""
        kept = self._survivals.get(key)
        if kept is not None:
            return kept
        workload, prompt_class = key
        wider = self._of_all() if prompt_class == _ANY_PROMPT else self._survival((workload, _ANY_PROMPT))
        group = self._groups.get(key)
        if group is None:
            return wider
        survival = self._survivals[key] = group.survival(wider)
        return survival

    def _of_all(self) -> Survival:
        if self._survival_of_all is None:
            self._survival_of_all = self._all.survival(TO_THE_BUDGET)
        return self._survival_of_all


class _Group:
    """The latest answers, in a ring: their order is of no account."""

    __slots__ = ("_added", "_ended", "_lengths")

    def __init__(self) -> None:
        self._lengths = np.zeros(WINDOW_ANSWERS, np.int64)
        self._ended = np.zeros(WINDOW_ANSWERS, np.bool_)
        self._added = 0

    def add(self, length_tokens: int, ended: bool) -> None:
        place = self._added % WINDOW_ANSWERS
        self._lengths[place] = length_tokens
        self._ended[place] = ended
        self._added += 1

    @property
    def answers(self) -> int:
        """Seen so far."""
        return self._added

    def survival(self, prior: Survival) -> Survival:
        known = min(self._added, WINDOW_ANSWERS)
        return prior.updated(self._lengths[:known], self._ended[:known], PRIOR_ANSWERS)


def _prompt_class(prompt_tokens: int) -> int:
    """k for 2^(k-1) to 2^k - 1 tokens."""
    return min(prompt_tokens.bit_length(), LONGEST_PROMPT_CLASS)
