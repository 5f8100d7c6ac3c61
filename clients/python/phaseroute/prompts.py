"""Prompts that share a long prefix: one handbook, a question at its end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

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
    # No token is longer than all words and none shorter than a byte: the answer lies in between.
    fits, too_many = 0, len(words)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        size = await client.probe(_chat(" ".join(words[:middle]), question))
        if size.prompt_tokens <= prompt_tokens:
            fits = middle
        else:
            too_many = middle
    return SharedPrefixPrompts(" ".join(words[:fits]))


def _handbook_words(count: int) -> list[str]:
    rules = (f"{number}. {advice}" for number, advice in enumerate(itertools.cycle(_ADVICE), start=1))
    words = (word for rule in rules for word in rule.split())
    return list(itertools.islice(words, count))


def _questions() -> Iterator[str]:
    for number in itertools.count(1):
        yield f"Question {number}: explain how {_TOPICS[number % len(_TOPICS)]} works."


def _chat(handbook: str, question: str) -> PromptLike:
    return [{"role": "system", "content": handbook}, {"role": "user", "content": question}]
