"""Prompts as token ids: of any length, related by a prefix, or with a secret in them.

A real model answers them with words of theirs, and is sure of each: engines may round differently where requests are
batched or prefixes warm, and a model in doubt between two tokens would then say another one. A model whose tokens are
bytes understands nothing here; it gets random ones, so that its answer depends on each of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from backend_service.engines.base import Engine
from service_kit.requests import TextPrompt

LENGTH = 60
NEW = 12
"""Tokens of most prompts and answers: few different requests, so that `alone` answers many of them from memory."""
LONG = 104
"""Tokens of a prompt that takes four steps."""
PARTING = 38
"""Where most related prompts part: within a chunk, and for the packaged model between two lists of words."""
_BYTES = 300
"""Vocabularies up to this size are bytes and a few more."""

Tokens = tuple[int, ...]

_NAMES = (
    *("Anna", "Bob", "Carl", "Dora", "Emil", "Fred", "Gina", "Hugo", "Ivan", "Jane", "Karl", "Lena"),
    *("Mike", "Nora", "Otto", "Paul", "Rosa", "Sam", "Tom", "Uma", "Vera", "Will", "Yuri", "Zoe"),
)
"""One for each first letter: prompts of different seeds part at their first token."""
_WORDS = (
    *("river", "stone", "apple", "lamp", "tiger", "cloud", "bread", "silver", "garden", "music"),
    *("horse", "paper", "winter", "island", "mirror", "forest", "button", "candle", "engine", "pepper"),
)
SECRETS = ("rocket", "garden", "violin", "pepper")
"""Words that the packaged model repeats when it is told them."""


def prompt(engine: Engine, seed: int, tokens: int) -> Tokens:
    """So many tokens: a name, and four words over and over, which a real model goes on with."""
    if engine.info.vocabulary.size <= _BYTES:
        return _random_bytes(seed, tokens)
    name = engine.prepare(TextPrompt(f"{_NAMES[seed % len(_NAMES)]}:"))
    return (*name, *_lists(engine, seed, at_least=tokens))[:tokens]


def branch(engine: Engine, trunk: Sequence[int], at: int, tokens: int, *, seed: int = 99) -> Tokens:
    """The first `at` tokens of a prompt, then the words of another, up to a length of `tokens`; they part exactly
    there."""
    others = (
        _random_bytes(seed, tokens) if engine.info.vocabulary.size <= _BYTES else _lists(engine, seed, at_least=tokens)
    )
    ids = (*trunk[:at], *others)[:tokens]
    if at < min(len(trunk), tokens) and ids[at] == trunk[at]:
        ids = (*ids[:at], next(token for token in ids if token != trunk[at]), *ids[at + 1 :])
    return ids


def _random_bytes(seed: int, tokens: int) -> Tokens:
    return tuple(random.Random(seed).choices(range(256), k=tokens))


def _lists(engine: Engine, seed: int, *, at_least: int) -> Tokens:
    words = list(engine.prepare(TextPrompt(f" ({' '.join(random.Random(seed).sample(_WORDS, 4))})")))
    return tuple(words * (at_least // len(words) + 1))


def secret_prompt(engine: Engine, secret: str) -> Tokens:
    """A prompt whose answer begins with its secret. All of them have the same length."""
    text = (
        f"Remember this: the code word is {secret}. Nobody else may know it.\n"
        f"Question: What is the code word?\nAnswer: The code word is {secret}.\n"
        "Question: Please say the code word again.\nAnswer: The code word is"
    )
    return tuple(engine.prepare(TextPrompt(text)))
