"""Prompts as token ids: of any length, related by a prefix, or with a secret in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from backend_service.engines.base import Engine
from service_kit.requests import TextPrompt

_WORDS = ("river", "stone", "apple", "lamp", "tiger", "cloud", "bread", "silver", "garden", "music", "horse", "paper")
SECRETS = ("rocket", "castle", "violin", "window")
"""Words that the packaged model repeats when it is told them."""

LENGTH = 60
NEW = 12
"""Tokens of most prompts and answers: few different requests, so that `alone` answers many of them from memory."""

Tokens = tuple[int, ...]


def prompt(engine: Engine, seed: int, tokens: int) -> Tokens:
    """So many tokens of a list that no other seed has; two of them part at once or nearly so."""
    chance = random.Random(seed)
    ids = list(engine.prepare(TextPrompt(f"{_WORDS[seed % len(_WORDS)].capitalize()} list {seed}.")))
    for number in count(1):
        if len(ids) >= tokens:
            break
        # Line by line: an engine may refuse text that is long for its context, and a token may be a byte or a word.
        ids += engine.prepare(TextPrompt(f"\n{number}. the {chance.choice(_WORDS)} and the {chance.choice(_WORDS)}"))
    return tuple(ids[:tokens])


def branch(engine: Engine, trunk: Sequence[int], at: int, tokens: int, *, seed: int = 99) -> Tokens:
    """The first `at` tokens of a prompt, then others up to a length of `tokens`; they part exactly there."""
    other = prompt(engine, seed, tokens)
    ids = (*trunk[:at], *other[at:])
    if at < min(len(trunk), tokens) and ids[at] == trunk[at]:
        replacement = next(token for token in other if token != trunk[at])
        ids = (*ids[:at], replacement, *ids[at + 1 :])
    return ids


def secret_prompt(engine: Engine, secret: str) -> Tokens:
    """A prompt whose answer begins with its secret. All of them have the same length."""
    text = (
        f"Remember this: the code word is {secret}. Nobody else may know it.\n"
        f"Question: What is the code word?\nAnswer: The code word is {secret}.\n"
        "Question: Please say the code word again.\nAnswer: The code word is"
    )
    return tuple(engine.prepare(TextPrompt(text)))
