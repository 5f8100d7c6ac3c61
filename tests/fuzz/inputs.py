"""All calls of a run, from its seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import hypothesis
from hypothesis import HealthCheck, Phase, settings

from tests.fuzz.calls import Call
from tests.fuzz.damage import WAYS
from tests.fuzz.messages import calls

CHUNK = 1000
STRUCTURED = 0.25
"""The part that hypothesis makes, which takes it milliseconds each; the rest is made from it."""
MERGED = 0.4
"""The part of the rest that is well formed, too: two messages, one after the other, are one message."""


def chunks(seed: int, count: int) -> Iterator[Sequence[Call]]:
    """So many calls, a thousand at a time."""
    for number, start in enumerate(range(0, count, CHUNK)):
        yield _chunk(f"{seed}.{number}", min(CHUNK, count - start))


def _chunk(seed: str, count: int) -> Sequence[Call]:
    chance = random.Random(f"damage {seed}")
    good = _structured(seed, max(1, round(count * STRUCTURED)))
    made = list(good)
    while len(made) < count:
        original = chance.choice(good)
        if chance.random() < MERGED:
            other = chance.choice([call for call in good if call.method == original.method])
            made.append(replace(original, body=original.body + other.body, metadata=other.metadata, how="merged"))
        else:
            how = chance.choice(list(WAYS))
            made.append(replace(original, body=WAYS[how](original.body, chance), how=how))
    chance.shuffle(made)
    return made[:count]


def _structured(seed: str, count: int) -> Sequence[Call]:
    """As many as hypothesis finds."""
    made: list[Call] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(calls())
    def collect(call: Call) -> None:
        made.append(call)

    collect()
    return made
