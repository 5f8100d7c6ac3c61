"""Prompts of a given length: some share a long prefix, one handbook with a question at its end; some share nothing."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from phaseroute.aio import AsyncClient
from phaseroute.requests import PromptLike

_ADVICE = (
    "Keep the workshop swept, because a clean floor shows a lost screw at once.",
    "Write the date on every tin of paint before you open it.",
    "Measure a board twice and cut it once, and mark the side that stays.",
    "Sharpen the plane when it starts to tear the grain, not when it stops cutting.",
    "Hang each saw back on its own nail when the day is over.",
    "Never leave the glue pot on the stove while you fetch timber from the yard.",
    "A visitor gets a chair, a cup of tea and a pair of safety glasses.",
    "Oil the hinges of the big door in spring and again before the first frost.",
    "Stack fresh planks with laths between them so that air can pass.",
    "Whoever breaks a drill bit puts a new one on the shopping list.",
    "Turn the lathe off at the wall before you change the belt.",
    "Answer letters from customers on the day they arrive, even if only briefly.",
)
_TOPICS = (
    "a sailing boat", "a bicycle", "a water clock", "a windmill", "a violin", "a stone bridge", "a lighthouse",
    "a compass", "a canal lock", "a printing press", "a telescope", "a bread oven", "a loom", "a sundial",
)  # fmt: skip


class Prompts(Protocol):
    """A source of prompts."""

    def next(self) -> PromptLike:
        """One that was not there before."""


class SharedPrefixPrompts:
    """Makes prompts that differ only after the handbook; no two are the same."""

    def __init__(self, handbook: str) -> None:
        self._handbook = handbook
        self._questions = _questions()

    def next(self) -> PromptLike:
        """A chat with a new question."""
        return _chat(self._handbook, next(self._questions))


async def shared_prefix_prompts(client: AsyncClient, prompt_tokens: int) -> SharedPrefixPrompts:
    """Prompts of about `prompt_tokens` tokens by the served model's own count, all but the question shared.

    The question takes some 20 tokens. Raises `PhaserouteError` when the server cannot count.
    """
    question = next(_questions())
    words = _handbook_words(prompt_tokens)
    fitting = await _fitting(client, words, prompt_tokens, lambda kept: _chat(" ".join(kept), question))
    return SharedPrefixPrompts(" ".join(fitting))


class DistinctPrompts:
    """Makes texts of one length that share no prefix: the same words in a new order each time, behind an opening word.

    Openings begin with each letter in turn, so no two of `OPENINGS` prompts in a row have their first token in common,
    whatever the tokenizer; later ones may share that letter, hardly more.
    """

    OPENINGS = string.ascii_uppercase + string.ascii_lowercase

    def __init__(self, words: Sequence[str], draw: random.Random) -> None:
        self._words = words
        self._draw = draw
        self._letters = itertools.cycle(self.OPENINGS)

    def next(self) -> PromptLike:
        """A new text."""
        opening = next(self._letters) + "".join(self._draw.choices(string.ascii_lowercase, k=5))
        return " ".join([opening, *self._draw.sample(self._words, len(self._words))])


async def distinct_prompts(client: AsyncClient, prompt_tokens: int, seed: int | None = None) -> DistinctPrompts:
    """Prompts of about `prompt_tokens` tokens by the served model's own count, which no server has seen before.

    `seed`: for the same prompts again. Raises `PhaserouteError` when the server cannot count.
    """
    draw = random.Random(seed)
    words = _handbook_words(prompt_tokens)
    return DistinctPrompts(
        await _fitting(client, words, prompt_tokens, lambda kept: DistinctPrompts(kept, random.Random(0)).next()), draw
    )


async def _fitting(
    client: AsyncClient, words: Sequence[str], prompt_tokens: int, prompt: Callable[[Sequence[str]], PromptLike]
) -> Sequence[str]:
    """The first of the words, as many as a prompt of this many tokens holds."""
    # No token is longer than all words and none shorter than a byte: the answer lies in between.
    fits, too_many = 0, len(words)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        size = await client.probe(prompt(words[:middle]))
        if size.prompt_tokens <= prompt_tokens:
            fits = middle
        else:
            too_many = middle
    return words[:fits]


def _handbook_words(count: int) -> list[str]:
    rules = (f"{number}. {advice}" for number, advice in enumerate(itertools.cycle(_ADVICE), start=1))
    words = (word for rule in rules for word in rule.split())
    return list(itertools.islice(words, count))


def _questions() -> Iterator[str]:
    for number in itertools.count(1):
        yield f"Question {number}: explain how {_TOPICS[number % len(_TOPICS)]} works."


def _chat(handbook: str, question: str) -> PromptLike:
    return [{"role": "system", "content": handbook}, {"role": "user", "content": question}]
