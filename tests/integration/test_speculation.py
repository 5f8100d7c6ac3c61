"""Answers with guesses are the answers without, whoever guesses.

Equal tokens need equal logits. With the tiny model rounding decides nothing, so everything is tried on it: batches,
cancels, sampling. The packaged model is quantised, and a different order of cells or number of rows can turn a near tie;
what is asked of it is equal to the bit (alone, flash attention, less than 64 rows) or clear (texts that it repeats).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import llama_cpp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_service.engines.base import Admission, Slice, StepResult
from backend_service.engines.llama_cpp import LlamaConfig, LlamaCppEngine
from backend_service.engines.llama_draft import LlamaDraft
from backend_service.engines.llama_model import LlamaModel
from backend_service.kv_pool import PoolLimits
from backend_service.models import locate_model
from backend_service.request import Failed, FinishReason
from backend_service.speculation.adaptive import AdaptiveProposer
from backend_service.speculation.base import Proposer
from backend_service.speculation.prompt_lookup import PromptLookup
from benchmarks.truncated_model import truncate
from service_kit.requests import ChatPrompt, ChatTurn, Prompt, Sampling, TextPrompt
from tests.integration.engines.bench import Answer, Bench
from tests.integration.engines.tiny_models import END_TOKEN, tiny_qwen2

CONFIG = LlamaConfig(PoolLimits(1024, max_live=4, retained_tokens=512), flash_attention=True)
STEP_TOKENS = 48
GUESSES = 4
NEW = 40
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=7),
    "seeded with penalties": Sampling(temperature=0.7, seed=11, repetition_penalty=1.3, frequency_penalty=0.3),
}
TINY_PROMPTS = tuple(tuple(range(start, start + length)) for start, length in ((50, 20), (90, 7), (3, 60), (150, 33)))

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

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], wrong: float = 0.0) -> None:
        self._texts = texts
        self._wrong = wrong
        self._chance = random.Random(5)
        self._sequences: dict[int, list[int]] = {}

    def start(self, handle: int, tokens: Sequence[int]) -> None:
        self._sequences[handle] = list(self._texts[tuple(tokens)])

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
            bench = Bench(LlamaCppEngine(model, CONFIG), step_tokens=STEP_TOKENS)
            answers[key] = bench.ask(tokens, max_new_tokens, **options)
        return answers[key]

    return ask


def speculating(model: LlamaModel, proposer: Proposer | None, guesses: int = GUESSES) -> Bench:
    """A scheduler over a fresh engine that verifies a proposer's guesses."""
    return Bench(CountingEngine(model, CONFIG, proposer), step_tokens=STEP_TOKENS, guesses=guesses)


def same(answer: Answer, other: Answer) -> bool:
    return (answer.tokens, answer.text, answer.reason) == (other.tokens, other.text, other.reason)


def nothing_held(proposer: Proposer) -> bool:
    """It has forgotten every sequence."""
    inner = getattr(proposer, "_proposer", proposer)
    if isinstance(inner, LlamaDraft):
        inner.check_integrity()
        assert not inner._reserved
    return not inner._sequences and not getattr(proposer, "_records", None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return LlamaModel(tiny_qwen2(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="module")
def tiny_truncated(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """One of its two layers: right now and then."""
    folder = tmp_path_factory.mktemp("tiny")
    truncate(tiny_qwen2(folder / "tiny.gguf"), folder / "truncated.gguf", [0])
    return LlamaModel(folder / "truncated.gguf")


@pytest.fixture(scope="module")
def plain(tiny: LlamaModel) -> Plain:
    return plain_answers(tiny)


@pytest.fixture(params=["prompt_lookup", "script", "adaptive", "truncated", "itself"])
def proposer(request: pytest.FixtureRequest, tiny: LlamaModel, tiny_truncated: LlamaModel, plain: Plain) -> Proposer:
    """Each in turn."""
    texts = {tokens: plain(tokens, NEW + 20).tokens for tokens in TINY_PROMPTS}
    made: dict[str, Callable[[], Proposer]] = {
        "prompt_lookup": lambda: PromptLookup(ngram_tokens=1),
        "script": lambda: Script(texts, wrong=0.3),
        "adaptive": lambda: AdaptiveProposer(Script(texts, wrong=0.2)),
        "truncated": lambda: LlamaDraft(tiny_truncated, tiny, CONFIG),
        "itself": lambda: LlamaDraft(tiny, tiny, CONFIG),
    }
    return made[request.param]()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_alone(sampling: Sampling, proposer: Proposer, tiny: LlamaModel, plain: Plain):
    for tokens in TINY_PROMPTS:
        bench = speculating(tiny, proposer)
        assert same(bench.ask(tokens, NEW, sampling=sampling), plain(tokens, sampling=sampling))
    assert nothing_held(proposer)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_in_a_batch(sampling: Sampling, proposer: Proposer, tiny: LlamaModel, plain: Plain):
    bench = speculating(tiny, proposer)
    names = [bench.submit(tokens, NEW, sampling=sampling) for tokens in TINY_PROMPTS]
    bench.run()
    for name, tokens in zip(names, TINY_PROMPTS, strict=True):
        assert same(bench.answer(name), plain(tokens, sampling=sampling))
    assert 0 < bench.inner.right <= bench.inner.guessed
    assert nothing_held(proposer)


def test_a_cancel_in_the_middle(proposer: Proposer, tiny: LlamaModel, plain: Plain):
    bench = speculating(tiny, proposer)
    stays, goes = (bench.submit(tokens, NEW) for tokens in TINY_PROMPTS[:2])
    bench.run(until=lambda: len(bench.tokens(goes)) > 12)
    bench.cancel(goes)
    said = bench.tokens(goes)
    late = bench.submit(TINY_PROMPTS[2], NEW)
    bench.run()
    assert said == plain(TINY_PROMPTS[1]).tokens[: len(said)]
    assert same(bench.answer(stays), plain(TINY_PROMPTS[0]))
    assert same(bench.answer(late), plain(TINY_PROMPTS[2]))
    assert nothing_held(proposer)


def test_wrong_guesses_leave_nothing_in_the_cache(proposer: Proposer, tiny: LlamaModel, plain: Plain):
    tokens = TINY_PROMPTS[0]
    bench = speculating(tiny, proposer)
    answer = bench.ask(tokens, NEW)
    use = bench.engine.stats()
    assert use.used_tokens == len(tokens) + NEW - 1
    assert use.reserved_tokens == 0
    after = Bench(bench.inner, step_tokens=STEP_TOKENS)  # without guesses
    longer = (*tokens, *answer.tokens, 1, 2, 3)
    if not isinstance(proposer, Script | AdaptiveProposer):  # which do not know that prompt
        warm = after.ask(longer, 8)
        assert warm.cached_tokens == len(tokens) + NEW - 1
        assert same(warm, plain(longer, 8))


def test_a_failed_step_makes_it_forget(
    proposer: Proposer, tiny: LlamaModel, plain: Plain, monkeypatch: pytest.MonkeyPatch
):
    bench = speculating(tiny, proposer)
    name = bench.submit(TINY_PROMPTS[0], NEW)
    bench.run(until=lambda: len(bench.tokens(name)) > 4)
    real, context = llama_cpp.llama_decode, bench.inner._context
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_decode", lambda of, batch: -3 if of is context else real(of, batch))
        bench.tick()
    assert isinstance(bench.events[-1], Failed)
    assert nothing_held(proposer)
    assert same(bench.ask(TINY_PROMPTS[0], NEW), plain(TINY_PROMPTS[0]))


def test_who_is_always_right_saves_all_the_steps_it_can(tiny: LlamaModel, plain: Plain):
    """And a draft model that is the target itself is."""
    bench = speculating(tiny, LlamaDraft(tiny, tiny, CONFIG))
    count = 1 + 6 * (1 + GUESSES)
    assert same(bench.ask(TINY_PROMPTS[0], count), plain(TINY_PROMPTS[0], count))
    assert len(bench.engine.steps) == 1 + 6
    assert bench.inner.right == bench.inner.guessed == 6 * GUESSES


@pytest.mark.parametrize("max_new_tokens", range(1, 2 * GUESSES + 3))
def test_the_length_ends_it_within_right_guesses(max_new_tokens: int, tiny: LlamaModel, plain: Plain):
    tokens = TINY_PROMPTS[0]
    bench = speculating(tiny, Script({tokens: plain(tokens).tokens}))
    answer = bench.ask(tokens, max_new_tokens)
    assert answer.reason is FinishReason.LENGTH
    assert answer.tokens == plain(tokens).tokens[:max_new_tokens]
    assert bench.engine.stats().used_tokens == len(tokens) + max_new_tokens - 1


@pytest.mark.parametrize("guesses", range(1, 8))
def test_the_end_token_ends_it_within_right_guesses(guesses: int, tiny: LlamaModel, plain: Plain):
    tokens, text = unending_text(tiny)
    ended = plain(tokens, len(text), ignore_eos=False, sampling=SAMPLINGS["seeded"])
    assert ended.reason is FinishReason.EOS
    assert list(ended.tokens) == text[: text.index(END_TOKEN)]
    bench = speculating(tiny, Script({tokens: text}), guesses)
    assert same(bench.ask(tokens, len(text), ignore_eos=False, sampling=SAMPLINGS["seeded"]), ended)
    assert bench.inner.right == bench.inner.guessed > 0


@pytest.mark.parametrize("guesses", range(1, 8))
def test_a_stop_string_ends_it_within_right_guesses(guesses: int, tiny: LlamaModel, plain: Plain):
    tokens = TINY_PROMPTS[0]
    text = plain(tokens).tokens
    ascii_run = next(
        bytes(text[place : place + 2]).decode() for place in range(9, NEW) if max(text[place : place + 2]) < 128
    )
    stopped = plain(tokens, stop=(ascii_run,))
    assert stopped.reason is FinishReason.STOP
    assert len(stopped.tokens) > 9
    bench = speculating(tiny, Script({tokens: text}), guesses)
    assert same(bench.ask(tokens, NEW, stop=(ascii_run,)), stopped)
    assert bench.inner.right == bench.inner.guessed > 0


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_load_with_any_mixture_of_right_and_wrong_guesses(data: st.DataObject, tiny: LlamaModel, plain: Plain):
    prompts = data.draw(st.lists(st.sampled_from(TINY_PROMPTS), min_size=1, max_size=6))
    samplings = [data.draw(st.sampled_from(list(SAMPLINGS.values()))) for _ in prompts]
    lengths = [data.draw(st.integers(1, NEW)) for _ in prompts]
    cancelled = {index: data.draw(st.integers(1, NEW)) for index in data.draw(st.sets(st.sampled_from(range(6))))}
    texts = {tokens: plain(tokens, NEW + 20).tokens for tokens in TINY_PROMPTS}
    script = Script(texts, wrong=data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])))
    bench = speculating(tiny, script, guesses=data.draw(st.integers(1, 10)))
    names = [
        bench.submit(tokens, length, sampling=sampling)
        for tokens, sampling, length in zip(prompts, samplings, lengths, strict=True)
    ]
    while bench.scheduler.busy:
        bench.tick()  # the books are checked after every step
        for index, name in enumerate(names):
            if len(bench.tokens(name)) >= cancelled.get(index, NEW + 1):
                bench.cancel(name)
    for name, tokens, sampling, length in zip(names, prompts, samplings, lengths, strict=True):
        said = bench.tokens(name)
        assert said == plain(tokens, sampling=sampling).tokens[: len(said)]
        assert len(said) <= length
    assert nothing_held(script)


def unending_text(model: LlamaModel) -> tuple[tuple[int, ...], list[int]]:
    """A prompt, and what the model says after it with the end token in it, because nobody heeds it."""
    for start in range(0, 250):
        tokens = tuple(range(start, min(start + 6, 256)))
        engine = LlamaCppEngine(model, CONFIG)
        admission = engine.admit(tokens, NEW, SAMPLINGS["seeded"], ignore_eos=False)
        assert isinstance(admission, Admission)
        text = list(engine.step([Slice(admission.handle, len(tokens))]).tokens[admission.handle])
        while len(text) < NEW:
            text += engine.step([Slice(admission.handle, 1)]).tokens[admission.handle]
        if END_TOKEN in text[9:20] and END_TOKEN not in text[:9]:
            return tokens, text
    raise AssertionError("the model ends none of its answers; try other prompts")


# The packaged model.

COPY = ChatPrompt(
    (
        ChatTurn(
            "user",
            "Repeat the following text word for word, and nothing else.\n\nThe harbour of Vellin lies where the river "
            "Osk meets the grey sea. For three hundred years the town lived from salt.",
        ),
    )
)
LIST = TextPrompt(
    "Monday: open at 9, close at 17, staff 3\nTuesday: open at 9, close at 17, staff 3\nWednesday: open at 9,"
)
TABLE = TextPrompt("| id | city | status |\n|---|---|---|\n| 1 | Oslo | active |\n| 2 | Oslo | active |\n| 3 |")
STORY = TextPrompt("The train was an hour late when Miriam saw the man with the green umbrella again.")
SHORT_ANSWER = ChatPrompt((ChatTurn("user", "Say only: yes"),))


@pytest.fixture(scope="module")
def packaged() -> LlamaModel:
    return LlamaModel(locate_model("default"))


@pytest.fixture(scope="module")
def packaged_plain(packaged: LlamaModel) -> Plain:
    return plain_answers(packaged)


@pytest.fixture(scope="module")
def truncated(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """26 of 30 layers guess about half of the tokens right, so that rows of guesses break off at every place."""
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    truncate(locate_model("default"), path, range(26))
    return LlamaModel(path)


@pytest.fixture(params=["prompt_lookup", "truncated", "itself"])
def real_proposer(request: pytest.FixtureRequest, packaged: LlamaModel, truncated: LlamaModel) -> Proposer:
    """Each in turn."""
    made: dict[str, Callable[[], Proposer]] = {
        "prompt_lookup": lambda: PromptLookup(ngram_tokens=2),
        "truncated": lambda: LlamaDraft(truncated, packaged, CONFIG),
        "itself": lambda: LlamaDraft(packaged, packaged, CONFIG),
    }
    return made[request.param]()


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [(LIST, "greedy"), (STORY, "greedy"), (STORY, "seeded"), (LIST, "seeded with penalties")],
    ids=["repetitive", "story", "story, seeded", "seeded with penalties"],
)
def test_packaged_model_alone(
    prompt: Prompt, sampling: str, real_proposer: Proposer, packaged: LlamaModel, packaged_plain: Plain
):
    bench = speculating(packaged, real_proposer)
    tokens = tuple(bench.engine.prepare(prompt))
    answer = bench.ask(tokens, NEW, sampling=SAMPLINGS[sampling])
    assert same(answer, packaged_plain(tokens, sampling=SAMPLINGS[sampling]))


def test_packaged_model_in_a_batch(real_proposer: Proposer, packaged: LlamaModel, packaged_plain: Plain):
    bench = speculating(packaged, real_proposer)
    prompts = [tuple(bench.engine.prepare(prompt)) for prompt in (COPY, LIST, TABLE)]
    names = [bench.submit(tokens, NEW) for tokens in prompts]
    bench.run()
    for name, tokens in zip(names, prompts, strict=True):
        assert same(bench.answer(name), packaged_plain(tokens))
    assert 0 < bench.inner.right <= bench.inner.guessed


@pytest.mark.parametrize("guesses", [2, 3, 4])
def test_packaged_model_ends_within_right_guesses(guesses: int, packaged: LlamaModel, packaged_plain: Plain):
    bench = speculating(packaged, None)
    tokens = tuple(bench.engine.prepare(SHORT_ANSWER))
    ended = packaged_plain(tokens, 64, ignore_eos=False)
    assert ended.reason is FinishReason.EOS
    (end, *_) = packaged.tokenize(ChatPrompt((ChatTurn("user", "x"),)), context_tokens=99)[-2:]  # <|im_end|>, newline
    bench = speculating(packaged, Script({tokens: [*ended.tokens, end, *tokens[:8]]}), guesses)
    assert same(bench.ask(tokens, 64, ignore_eos=False), ended)
    assert bench.inner.right > len(ended.tokens) // 2
