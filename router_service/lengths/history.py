"""Answers become as long as earlier ones to prompts of the same kind and size did."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from router_service.lengths.answers import Answers
from router_service.lengths.base import LengthOutcome, LengthQuery
from router_service.lengths.survival import TO_THE_BUDGET, Survival

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
_FORMAT = 1
"""Of what `state` tells."""
_LONGEST_LABEL = 256
"""As long as a request's may be."""


class History:
    """For each workload and class of prompt lengths (powers of two), the distribution of the latest 256 answers.

    A group's prior is the next wider one's distribution: class, workload, all requests, and at last that answers run to
    their budget. So a new group is priced as its workload is, and the very first request at its budget. State is
    bounded: 512 groups of 256 answers.
    """

    name = "history"

    def __init__(self) -> None:
        self.version = 0
        self._all = Answers()
        self._groups: OrderedDict[tuple[str, int], Answers] = OrderedDict()
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
            self._groups.setdefault(key, Answers()).add(length, ended)
            self._groups.move_to_end(key)
        while len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        seen = self._groups[key].seen
        if seen <= YOUNG_ANSWERS or seen % REFRESH_ANSWERS == 0:
            self._refresh()

    def state(self) -> dict[str, Any]:
        """The answers of all groups, the one longest without an answer first; 1.5 MB of JSON at most."""
        if not self._all.seen:
            return {}
        return {
            "format": _FORMAT,
            "all": self._all.encoded(),
            "groups": [[*key, answers.encoded()] for key, answers in self._groups.items()],
        }

    def restore(self, state: object) -> bool:
        """See `LengthEstimator.restore`. Answers that another one had not yet counted, because few at a time change
        nothing, are counted here."""
        match state:
            case {"format": int(number), "all": every, "groups": list(listed)} if number == _FORMAT:
                everything = Answers.decoded(every)
                groups = OrderedDict(group for item in listed if (group := _group(item)) is not None)
            case _:
                return False
        if everything is None or not len(groups) == len(listed) <= MAX_GROUPS:
            return False
        self._all, self._groups = everything, groups
        self._refresh()
        return True

    def _refresh(self) -> None:
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


def _prompt_class(prompt_tokens: int) -> int:
    """k for 2^(k-1) to 2^k - 1 tokens."""
    return min(prompt_tokens.bit_length(), LONGEST_PROMPT_CLASS)


def _group(item: object) -> tuple[tuple[str, int], Answers] | None:
    """One of those that `History.state` lists; None for anything else."""
    match item:
        case [str(workload), int(prompt_class), encoded] if (
            len(workload) <= _LONGEST_LABEL and _ANY_PROMPT <= prompt_class <= LONGEST_PROMPT_CLASS
        ):
            answers = Answers.decoded(encoded)
            return None if answers is None else ((workload, prompt_class), answers)
        case _:
            return None
