"""Speculative decoding: tokens/s and right guesses by workload, batch size and proposer, against no guesses.

    python -m benchmarks.speculation [--cpu 0] [--rounds 3] [--tokens 128] [--batches 1 4] [--draft-layers 8 22]
    python -m benchmarks.speculation --ngrams 1 2 3 4 5 6 --batches 1    # how long an n-gram to look up

The packaged model, one thread, scheduler and engine alone: no wire. Draft models are the packaged one with only its
first layers, and the packaged one itself, whose guesses are nearly always right: the most that a draft model could do.
Timed is decoding, once all prompts are computed. Rounds go through all variants in turn; each figure is a median over
them. Prints a table for each batch size and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from backend_service.engines.base import Slice, StepResult
from backend_service.engines.llama_cpp import LlamaConfig, LlamaCppEngine
from backend_service.engines.llama_draft import LlamaDraft
from backend_service.engines.llama_model import LlamaModel
from backend_service.kv_pool import PoolLimits
from backend_service.models import locate_model
from backend_service.request import Phase, Progress, Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.speculation.adaptive import AdaptiveProposer
from backend_service.speculation.base import Proposer
from backend_service.speculation.prompt_lookup import PromptLookup
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from benchmarks.truncated_model import truncate
from service_kit.requests import ChatPrompt, ChatTurn, Prompt, Sampling, TextPrompt

CAPACITY_TOKENS = 2048
SENTENCES = (
    "The harbour of Vellin lies where the river Osk meets the grey sea.",
    "For three hundred years the town lived from salt, boiled in long low houses on the eastern bank.",
    "In 1871 the railway came, and with it cheap salt from the mines of Harn.",
    "Within ten years all but two of the boiling houses had closed.",
    "The mayor, Agnes Tolland, persuaded the council to spend the last of the salt money on a stone quay.",
    "The first ship that tied up there, the Marigold, brought timber from the north.",
    "Her captain stayed, bought one of the empty houses, and opened a chandlery in it.",
    "By the turn of the century forty ships a month unloaded at the quay, and the town had doubled.",
)
STORIES = ("a lighthouse keeper who finds a letter", "a late train", "two sisters and a garden", "a lost dog")
CLASSES = ("account", "inventory", "timetable", "library")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are alike."""

    prompt: Callable[[int], Prompt]
    """Of each request of a batch."""
    sampling: Callable[[int], Sampling] = lambda _index: Sampling()


@dataclass(frozen=True, slots=True)
class Variant:
    """Who guesses, and how many tokens."""

    name: str
    make: Callable[[], Proposer | None]
    guesses: int


@dataclass(slots=True)
class Measured:
    """One variant on one workload and batch size; a list entry for each round."""

    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_step: float = 0.0
    """Of one sequence."""
    guessed: int = 0
    right: int = 0
    answers: Sequence[tuple[int, ...]] = ()

    @property
    def rate(self) -> float:
        """Median tokens/s of the whole batch."""
        return statistics.median(self.tokens_per_s)


class CountingEngine(LlamaCppEngine):
    """Counts guesses, and those that were right."""

    guessed = right = steps = 0

    def step(self, slices: Sequence[Slice]) -> StepResult:
        """See `Engine.step`."""
        result = super().step(slices)
        self.steps += 1
        self.guessed += sum(result.guesses.values())
        self.right += sum(len(tokens) - 1 for tokens in result.tokens.values())
        return result


def copied(index: int) -> Prompt:
    """An answer that is in the prompt already."""
    text = " ".join((*SENTENCES[index:], *SENTENCES[:index]))
    return ChatPrompt((ChatTurn("user", f"Repeat the following text word for word, and nothing else.\n\n{text}"),))


def story(index: int) -> Prompt:
    """An answer of which nothing is in the prompt."""
    return ChatPrompt((ChatTurn("user", f"Write a short story about {STORIES[index % len(STORIES)]}."),))


def code(index: int) -> Prompt:
    """Names and phrases come back, lines hardly."""
    name = CLASSES[index % len(CLASSES)]
    return TextPrompt(
        f'class {name.title()}:\n    """A small {name}."""\n\n    def __init__(self, name, items=None):\n'
        "        self.name = name\n        self.items = items or {}\n\n    def add(self, key, value):\n"
    )


WORKLOADS = {
    "copy": Workload(copied),
    "story": Workload(story, lambda index: Sampling(temperature=0.8, top_p=0.95, seed=index)),
    "code": Workload(code),
}


def run(engine: CountingEngine, workload: Workload, batch: int, new_tokens: int, guesses: int, into: Measured) -> None:
    """A batch from empty to done."""
    scheduler = Scheduler(engine, SchedulerLimits(batch, StepLimits(guesses=guesses)))
    vocabulary = engine.info.vocabulary
    answers: dict[str, list[int]] = {str(index): [] for index in range(batch)}
    for index in range(batch):
        scheduler.submit(
            Request(
                id=str(index),
                tokens=engine.prepare(workload.prompt(index)),
                max_new_tokens=new_tokens,
                sampling=workload.sampling(index),
                ignore_eos=True,
                text=TextStream(vocabulary.pieces),
                eos=vocabulary.eos,
                reusable_estimate=0,
                submitted_s=0.0,
            )
        )

    def tick() -> None:
        for event in scheduler.tick():
            if isinstance(event, Progress):
                answers[event.request_id] += event.token_ids

    while any(request.phase is not Phase.DECODE for request in scheduler.snapshot().requests):
        tick()
    before = sum(map(len, answers.values()))
    engine.steps = engine.guessed = engine.right = 0
    begun_s = time.perf_counter()
    while scheduler.busy:
        tick()
    seconds = time.perf_counter() - begun_s
    count = sum(map(len, answers.values())) - before
    into.tokens_per_s.append(count / seconds)
    into.tokens_per_step = count / batch / engine.steps
    into.guessed, into.right = engine.guessed, engine.right
    into.answers = [tuple(tokens) for tokens in answers.values()]


def variants(
    target: LlamaModel, config: LlamaConfig, folder: Path, draft_layers: Sequence[int], ngrams: Sequence[int]
) -> list[Variant]:
    """No guesses first."""
    listed = [Variant("off", lambda: None, 0)]
    for length in ngrams:
        listed.append(Variant(f"{length}-grams, always 4", partial(PromptLookup, ngram_tokens=length), 4))
    if ngrams:
        return listed
    for guesses in (2, 4, 8):
        listed.append(Variant(f"prompt_lookup, {guesses}", lambda: AdaptiveProposer(PromptLookup()), guesses))
    listed.append(Variant("prompt_lookup, always 4", PromptLookup, 4))
    for layers in draft_layers:
        path = folder / f"draft-{layers}.gguf"
        truncate(locate_model("default"), path, range(layers))
        draft = LlamaModel(path)
        for name, adaptive in ((f"draft of {layers} layers, 4", True), (f"draft of {layers} layers, always 4", False)):
            listed.append(Variant(name, drafting(draft, target, config, adaptive=adaptive), 4))
    listed.append(Variant("draft is the model itself, 4", drafting(target, target, config, adaptive=True), 4))
    return listed


def drafting(draft: LlamaModel, target: LlamaModel, config: LlamaConfig, *, adaptive: bool) -> Callable[[], Proposer]:
    """Makes proposers with a context of their own."""

    def make() -> Proposer:
        proposer = LlamaDraft(draft, target, config)
        return AdaptiveProposer(proposer) if adaptive else proposer

    return make


def show(batch: int, names: Sequence[str], measured: Mapping[tuple[str, str, int], Measured]) -> None:
    """A table of one batch size."""
    table = Table(title=f"batch {batch}: decode tokens/s (against off), right of all guesses, tokens a step")
    table.add_column("guesses")
    for workload in WORKLOADS:
        table.add_column(workload, justify="right")
    for name in names:
        cells = []
        for workload in WORKLOADS:
            one, off = measured[name, workload, batch], measured["off", workload, batch]
            share = f"{one.right / one.guessed:4.0%}" if one.guessed else "   -"
            cells.append(f"{one.rate:6.1f} ({one.rate / off.rate:.2f}) {share} {one.tokens_per_step:.2f}")
        table.add_row(name, *cells)
    Console(width=max(Console().width, 120)).print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each request")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--draft-layers", type=int, nargs="*", default=[8, 22])
    parser.add_argument("--ngrams", type=int, nargs="*", default=[], help="compare these lengths, and nothing else")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.cpu})
    model = LlamaModel(locate_model("default"))
    config = LlamaConfig(PoolLimits(CAPACITY_TOKENS, max_live=max(options.batches), max_retained=0))
    with tempfile.TemporaryDirectory() as folder:
        compared = variants(model, config, Path(folder), options.draft_layers, options.ngrams)
    measured: dict[tuple[str, str, int], Measured] = {}
    engines = {variant.name: CountingEngine(model, config, variant.make()) for variant in compared}
    for _ in range(options.rounds):
        for workload_name, workload in WORKLOADS.items():
            for batch in options.batches:
                for variant in compared:
                    into = measured.setdefault((variant.name, workload_name, batch), Measured())
                    run(engines[variant.name], workload, batch, options.tokens, variant.guesses, into)
    for batch in options.batches:
        show(batch, [variant.name for variant in compared], measured)
    results = [
        {
            "guesses": name,
            "workload": workload,
            "batch": batch,
            "tokens_per_s": round(one.rate, 1),
            "against_off": round(one.rate / measured["off", workload, batch].rate, 3),
            "guessed": one.guessed,
            "right": one.right,
            "tokens_per_step": round(one.tokens_per_step, 2),
            "same_answers": sum(map(operator.eq, one.answers, measured["off", workload, batch].answers)),
        }
        for (name, workload, batch), one in measured.items()
    ]
    print(json.dumps({"benchmark": "speculation", "rounds": options.rounds, "results": results}))


if __name__ == "__main__":
    main()
