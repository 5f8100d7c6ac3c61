"""The prompts of a scenario as token ids, so that lengths and shared prefixes are exact without a tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from phaseroute.scenarios.planned import Planned, Scenario

FIRST_ID, LAST_ID = 32, 255
"""Ids that are drawn from: every vocabulary has them, beyond the special tokens that most have at the start. To a model
they read as noise, which changes no length and no time of a request that ignores the model's end."""

_IDS = bytes(FIRST_ID + value % (LAST_ID - FIRST_ID + 1) for value in range(256))


class ScenarioPrompts:
    """Prompts for one play of a scenario: made of its shared prefixes, and of what each request has for itself.

    Warm prefixes are the same in all plays with one seed; everything else is new in each play, so that nothing is left
    in a cache from the play before. Two prompts that share nothing may still begin with one equal token by chance.
    """

    def __init__(self, scenario: Scenario, *, seed: int, play: int) -> None:
        """`play`: counts the plays of a session."""
        self._seed = seed
        self._play = play
        self._warm = frozenset(scenario.warm)
        self._longest: dict[int, int] = {}
        for item in scenario.requests:
            if item.prefix >= 0:
                self._longest[item.prefix] = max(item.prefix_tokens, self._longest.get(item.prefix, 0))
        self._prefixes: dict[int, tuple[int, ...]] = {}

    def prompt(self, index: int, planned: Planned) -> tuple[int, ...]:
        """Of request `index` of the scenario: `prompt_tokens` ids."""
        shared = self._prefix(planned.prefix)[: planned.prefix_tokens] if planned.prefix >= 0 else ()
        return (*shared, *_ids(planned.prompt_tokens - len(shared), self._seed, self._play, "own", index))

    def warm_prompts(self, attempt: int) -> Sequence[tuple[int, ...]]:
        """One for each warm prefix, as long as its longest use and one token more: the last token of a prompt is always
        computed. Another such token in another attempt."""
        return [
            (*self._prefix(number), FIRST_ID + attempt)
            for number in sorted(self._warm)
            if self._longest.get(number, 0) > 0
        ]

    def _prefix(self, number: int) -> tuple[int, ...]:
        if number not in self._prefixes:
            play = "all" if number in self._warm else self._play
            self._prefixes[number] = _ids(self._longest[number], self._seed, play, "prefix", number)
        return self._prefixes[number]


def _ids(count: int, *key: object) -> tuple[int, ...]:
    """Drawn from a stream that the key names, so that a longer draw begins with a shorter one."""
    return tuple(random.Random("/".join(map(str, key))).randbytes(count).translate(_IDS))
