"""What the clients of a chaos run ask for: planned from a seed, so that a run can be played again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from phaseroute.v1 import inference_pb2 as pb

CLIENTS = ("ada", "bob", "cyd", "dan")
_TEXT = (
    "river stone light carries under seven bridges while morning trains leave for the coast and nobody asks why the "
    "clock above the square runs slow in winter or how many windows face the sea from here"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt as token ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turns:
    """A prompt as a chat."""

    turns: tuple[tuple[str, str], ...]
    """(role, content)"""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, and what its client will do while it runs."""

    index: int
    client: str
    prompt: str | TokenIds | Turns
    max_new_tokens: int
    ignore_eos: bool = True
    stop: tuple[str, ...] = ()
    priority: pb.Priority = pb.PRIORITY_INTERACTIVE
    workload: str = ""
    cancel_after_tokens: int | None = None
    """The client cancels when it has so many tokens."""
    cancel_after_s: float | None = None
    """The client cancels so long after it sent the request."""
    deadline_s: float | None = None

    @property
    def gives_up(self) -> bool:
        """Its client may cancel it."""
        return self.cancel_after_tokens is not None or self.cancel_after_s is not None

    def to_proto(self) -> pb.GenerateRequest:
        """As it is sent."""
        request = pb.GenerateRequest(
            max_new_tokens=self.max_new_tokens,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
            priority=self.priority,
            workload=self.workload,
            attempt=pb.Attempt(client=self.client),
        )
        match self.prompt:
            case str(text):
                request.prompt.text = text
            case TokenIds(ids):
                request.prompt.token_ids.ids.extend(ids)
            case Turns(turns):
                for role, content in turns:
                    request.prompt.chat.messages.add(role=role, content=content)
        return request


def mixed_load(seed: int, count: int) -> Iterator[PlannedRequest]:
    """Short and long, in all three forms of prompts, over shared prefixes; some are cancelled, some have deadlines.
    For the simulated engine."""
    chance = random.Random(f"requests {seed}")
    prefixes = [_text(chance, chance.randrange(30, 250)) for _ in range(6)]
    for index in range(count):
        long = chance.random() < 0.4
        words = chance.randrange(100, 400) if long else chance.randrange(3, 40)
        text = _text(chance, words)
        if chance.random() < 0.5:
            text = f"{chance.choice(prefixes)} {text}"
        giving_up = chance.random()
        new_tokens = chance.randrange(60, 250) if long else chance.randrange(1, 40)
        yield PlannedRequest(
            index=index,
            client=chance.choice(CLIENTS),
            prompt=_formed(chance, text),
            max_new_tokens=new_tokens,
            ignore_eos=chance.random() < 0.7,
            stop=(chance.choice((" t", "ee", "q")),) if chance.random() < 0.15 else (),
            priority=chance.choice((pb.PRIORITY_INTERACTIVE, pb.PRIORITY_BATCH)),
            workload=chance.choice(("", "chat", "summary")),
            cancel_after_tokens=chance.randrange(1, new_tokens + 1) if giving_up < 0.06 else None,
            cancel_after_s=chance.uniform(0.0, 2.0) if 0.06 <= giving_up < 0.1 else None,
            deadline_s=chance.uniform(0.3, 4.0) if 0.1 <= giving_up < 0.18 else None,
        )


def small_load(seed: int, count: int) -> Iterator[PlannedRequest]:
    """Few and short, greedy, as text: for backends with a real model on few cores."""
    chance = random.Random(f"requests {seed}")
    for index in range(count):
        yield PlannedRequest(
            index=index,
            client=chance.choice(CLIENTS),
            prompt=f"Question {index}: {_text(chance, chance.randrange(5, 40))}. Answer:",
            max_new_tokens=chance.randrange(16, 64),
        )


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=words))


def _formed(chance: random.Random, text: str) -> str | TokenIds | Turns:
    match chance.randrange(3):
        case 0:
            return TokenIds(tuple(text.encode()))
        case 1:
            return Turns((("system", "Answer briefly."), ("user", text)))
        case _:
            return text
