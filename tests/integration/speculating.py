"""An engine that verifies guesses, its answers without any, and a proposer that is as right as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from backend_service.engines.base import Slice, StepResult
from backend_service.engines.llama_cpp import LlamaConfig, LlamaCppEngine
from backend_service.engines.llama_draft import LlamaDraft
from backend_service.engines.llama_model import LlamaModel
from backend_service.kv_pool import PoolLimits
from backend_service.scheduler import Scheduler
from backend_service.speculation.base import Proposer
from backend_service.step_plan import StepLimits
from tests.integration.engines.bench import Answer, Bench

CONFIG = LlamaConfig(PoolLimits(1024, max_live=4, retained_tokens=512))
GUESSES = 4
NEW = 40

Plain = Callable[..., Answer]


class CountingEngine(LlamaCppEngine):
    """Keeps how many guesses there were, and how many of them were right."""

    guessed = right = 0

    def step(self, slices: Sequence[Slice]) -> StepResult:
        result = super().step(slices)
        self.guessed += sum(result.guesses.values())
        self.right += sum(len(tokens) - 1 for tokens in result.tokens.values())
        return result


class Script:
    """Was told what follows each prompt, and gets some of it wrong; no end token stops it."""

    name = "script"

    def __init__(self, texts: dict[tuple[int, ...], Sequence[int]], wrong: float = 0.0) -> None:
        self.texts = texts
        self._wrong = wrong
        self._chance = random.Random(5)
        self._sequences: dict[int, list[int]] = {}

    def start(self, handle: int, tokens: Sequence[int]) -> None:
        self._sequences[handle] = list(self.texts[tuple(tokens)])

    def accept(self, handle: int, tokens: Sequence[int]) -> None:
        assert tokens, "a step that sampled nothing was reported"
        del self._sequences[handle][: len(tokens)]

    def guess(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        return {
            handle: [
                token if self._chance.random() >= self._wrong else token ^ 1
                for token in self._sequences[handle][: self._chance.randint(count // 2, count)]
            ]
            for handle, count in wanted.items()
        }

    def forget(self, handle: int) -> None:
        del self._sequences[handle]


def plain_answers(model: LlamaModel) -> Plain:
    """Answers without guesses, from engines that have nothing else to do; each computed once."""
    answers: dict[object, Answer] = {}

    def ask(tokens: tuple[int, ...], max_new_tokens: int = NEW, **options: object) -> Answer:
        key = (tokens, max_new_tokens, *options.items())
        if key not in answers:
            bench = Bench(LlamaCppEngine(model, CONFIG))
            answers[key] = bench.ask(tokens, max_new_tokens, **options)
        return answers[key]

    return ask


@dataclass
class GuessingBench(Bench):
    """Whose scheduler asks for guesses."""

    guesses: int = GUESSES

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limits = replace(self.limits, step=StepLimits(self.step_tokens, guesses=self.guesses))
        self.scheduler = Scheduler(self.engine, self.limits)


def speculating(model: LlamaModel, proposer: Proposer, guesses: int = GUESSES) -> GuessingBench:
    """A scheduler over a fresh engine that verifies a proposer's guesses."""
    return GuessingBench(CountingEngine(model, CONFIG, proposer), guesses=guesses)


def same(answer: Answer, other: Answer) -> bool:
    return (answer.tokens, answer.text, answer.reason) == (other.tokens, other.text, other.reason)


def nothing_held(proposer: Proposer) -> bool:
    """It has forgotten every sequence."""
    inner = getattr(proposer, "_proposer", proposer)
    if isinstance(inner, LlamaDraft):
        inner.check_integrity()
        assert not inner._reserved
    return not inner._sequences and not getattr(proposer, "_records", None)
