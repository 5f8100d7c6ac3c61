"""The draft model's own cache and guesses, on tiny models with random weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import llama_cpp
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from backend_service.engines.llama_cpp import LlamaConfig, LlamaCppEngine
from backend_service.engines.llama_draft import CATCH_UP_TOKENS, LlamaDraft
from backend_service.engines.llama_model import LlamaModel
from backend_service.kv_pool import PoolLimits
from benchmarks.truncated_model import truncate
from service_kit.faults import StartupFailed
from tests.integration.engines.bench import Bench
from tests.integration.engines.tiny_models import CONTEXT_TOKENS, END_TOKEN, LAYERS, VOCABULARY, tiny_mamba, tiny_qwen2

CELLS = 512
CONFIG = LlamaConfig(PoolLimits(CELLS, max_live=4))
PROMPT = tuple(range(72, 92))
"""What the model says after it is so clear that rounding decides nothing."""
Batches = list[int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return LlamaModel(tiny_qwen2(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture
def draft(model: LlamaModel) -> LlamaDraft:
    return LlamaDraft(model, model, CONFIG)


@pytest.fixture(scope="module")
def says(model: LlamaModel) -> Callable[[Sequence[int], int], tuple[int, ...]]:
    """What the model says after a prompt."""
    return lambda tokens, count: Bench(LlamaCppEngine(model, CONFIG)).ask(tokens, count).tokens


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    """Rows of each computation."""
    real, rows = llama_cpp.llama_decode, []

    def counted(context: object, batch: llama_cpp.llama_batch) -> int:
        rows.append(batch.n_tokens)
        return real(context, batch)

    monkeypatch.setattr(llama_cpp, "llama_decode", counted)
    return rows


def test_guesses_are_what_the_model_would_say(draft: LlamaDraft, says: Callable[..., tuple[int, ...]]):
    draft.start(0, PROMPT)
    text = says(PROMPT, 21)
    for step in range(4):
        assert draft.guess({0: 4})[0] == list(text[5 * step : 5 * step + 4])
        draft.accept(0, text[5 * step : 5 * step + 5])
        draft.check_integrity()


def test_k_guesses_for_all_sequences_take_k_computations(draft: LlamaDraft, batches: Batches):
    draft.start(0, PROMPT)
    draft.start(3, PROMPT[:5])
    assert {handle: len(tokens) for handle, tokens in draft.guess({0: 4, 3: 2}).items()} == {0: 4, 3: 2}
    assert batches == [len(PROMPT) + 5, 2, 1, 1]


def test_right_guesses_are_not_computed_again_and_wrong_ones_are_taken_back(
    draft: LlamaDraft, batches: Batches, says: Callable[..., tuple[int, ...]]
):
    draft.start(0, PROMPT)
    right = draft.guess({0: 4})[0]
    draft.accept(0, [*right, 7])
    batches.clear()
    guess = draft.guess({0: 4})[0]
    assert batches == [2, 1, 1, 1]  # the last guess was not computed yet, nor was the token after it
    other = (guess[1] + 1) % 256
    draft.accept(0, [guess[0], other])
    batches.clear()
    anew = draft.guess({0: 4})
    assert batches == [1, 1, 1, 1]
    assert anew == draft.guess({0: 4}), "asking changes nothing"
    assert anew == {0: list(says((*PROMPT, *right, 7, guess[0], other), 4))}
    draft.check_integrity()


@pytest.mark.parametrize("came", [PROMPT[:9], (200, 7, 31)])
def test_what_came_while_nothing_was_asked_is_made_up_for(
    came: tuple[int, ...], draft: LlamaDraft, says: Callable[..., tuple[int, ...]]
):
    draft.start(0, PROMPT)
    draft.guess({0: 4})
    for token in came:
        draft.accept(0, [token])
        draft.guess({})
    assert draft.guess({0: 4})[0] == list(says((*PROMPT, *came), 4))


def test_a_long_prompt_is_caught_up_on_over_several_steps(
    draft: LlamaDraft, batches: Batches, says: Callable[..., tuple[int, ...]]
):
    long, count = [*range(250)][:200], 4
    draft.start(0, PROMPT)
    draft.start(1, long)
    share = CATCH_UP_TOKENS + count + 1 - max(0, len(PROMPT) - count - 1)
    steps = 0
    known = list(PROMPT)
    while 1 not in (guesses := draft.guess({0: count, 1: count})):
        assert len(guesses[0]) == count
        draft.accept(0, guesses[0][:1])
        known += guesses[0][:1]
        steps += 1
        assert batches[0] <= CATCH_UP_TOKENS + 2 * (count + 1)
        batches.clear()
    assert steps == 1 + (len(long) - share - 1) // (CATCH_UP_TOKENS + count + 1)
    assert guesses[1] == list(says(long, count))


def test_an_end_token_ends_the_guesses(model: LlamaModel, monkeypatch: pytest.MonkeyPatch):
    draft = LlamaDraft(model, model, CONFIG)
    draft.start(0, PROMPT)
    text = draft.guess({0: 4})[0]
    monkeypatch.setattr(draft, "_vocabulary", replace(model.vocabulary, eos=frozenset({text[1]})))
    draft.start(1, PROMPT)
    assert draft.guess({1: 4})[1] == text[:2]


def test_without_room_there_are_no_guesses_until_there_is(draft: LlamaDraft):
    long = [token % 256 for token in range(CELLS - 10)]
    draft.start(0, long)
    while not draft.guess({0: 1}):
        draft.check_integrity()
    draft.start(1, PROMPT)
    assert set(draft.guess({0: 1, 1: 1})) == {0}
    draft.accept(0, [1] * 10)
    assert set(draft.guess({0: 1, 1: 1})) == {1}, "who has outgrown the cache must give way"
    draft.check_integrity()
    draft.forget(1)
    draft.forget(0)
    draft.check_integrity()
    assert draft._reserved == 0


def test_nothing_is_guessed_beyond_the_context_that_the_draft_was_trained_for(model: LlamaModel):
    draft = LlamaDraft(model, model, LlamaConfig(PoolLimits(CONTEXT_TOKENS + 256, max_live=2)))
    draft.start(0, [token % 256 for token in range(CONTEXT_TOKENS - 1)])
    assert not draft.guess({0: 2})
    draft.check_integrity()
    assert draft._sequences[0].reserved == 0


def test_a_failed_computation_ends_the_guesses_of_its_sequences_and_is_said_once(
    draft: LlamaDraft, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    draft.start(0, PROMPT)
    draft.start(1, PROMPT)
    draft.guess({0: 2, 1: 2})
    draft.start(2, PROMPT)
    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr(llama_cpp, "llama_decode", lambda _context, _batch: -3)
            assert draft.guess({0: 2}) == {}
            assert draft.guess({2: 2}) == {}
        assert set(draft.guess({0: 2, 1: 2, 2: 2})) == {1}
    assert len([record for record in caplog.records if "draft" in record.message]) == 1
    draft.check_integrity()
    draft.forget(0)
    draft.start(0, PROMPT)
    assert set(draft.guess({0: 2})) == {0}


def test_a_failure_between_two_guesses_keeps_the_first(draft: LlamaDraft, monkeypatch: pytest.MonkeyPatch):
    draft.start(0, PROMPT)
    real, calls = llama_cpp.llama_decode, []
    monkeypatch.setattr(
        llama_cpp, "llama_decode", lambda of, batch: calls.append(1) or (-3 if len(calls) == 2 else real(of, batch))
    )
    assert len(draft.guess({0: 4})[0]) == 1
    draft.check_integrity()


class Following(RuleBasedStateMachine):
    """Whatever is accepted, cache and books agree."""

    model: LlamaModel

    @initialize()
    def make(self) -> None:
        self.draft = LlamaDraft(self.model, self.model, CONFIG)
        self.known: dict[int, list[int]] = {}
        self.last: dict[int, Sequence[int]] = {}

    @rule(handle=st.integers(0, 3), tokens=st.lists(st.integers(0, 255), min_size=1, max_size=150))
    def start_anew(self, handle: int, tokens: list[int]) -> None:
        if self.known.pop(handle, None):
            self.draft.forget(handle)
        self.draft.start(handle, tokens)
        self.known[handle] = tokens[:]
        self.last.pop(handle, None)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def guess(self, data: st.DataObject) -> None:
        wanted = data.draw(st.dictionaries(st.sampled_from(sorted(self.known)), st.integers(0, 6)))
        guesses = self.draft.guess(wanted)
        self.last.update(guesses)
        for handle, tokens in guesses.items():
            assert 1 <= len(tokens) <= wanted[handle]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 255), min_size=1, max_size=3))
    def accept(self, data: st.DataObject, tokens: list[int]) -> None:
        handle = data.draw(st.sampled_from(sorted(self.known)))
        guessed = self.last.pop(handle, ())
        accepted = [*guessed[: data.draw(st.integers(0, len(guessed)))], *tokens]
        self.draft.accept(handle, accepted)
        self.known[handle] += accepted

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "draft"):
            self.draft.check_integrity()
            for handle, known in self.known.items():
                assert self.draft._sequences[handle].known == known


def test_books_and_cache_agree_whatever_is_accepted(model: LlamaModel):
    Following.model = model
    run_state_machine_as_test(Following, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))


def test_a_model_with_another_vocabulary_is_refused(model: LlamaModel, tmp_path: Path):
    smaller = LlamaModel(tiny_qwen2(tmp_path / "same.gguf"))
    pieces = list(smaller.vocabulary.pieces)
    smaller.vocabulary = replace(smaller.vocabulary, pieces=pieces[:-1])
    with pytest.raises(StartupFailed, match=f"{VOCABULARY - 1} tokens and .* {VOCABULARY}.*same family"):
        LlamaDraft(smaller, model, CONFIG)
    smaller.vocabulary = replace(smaller.vocabulary, pieces=[*pieces[:97], b"b", *pieces[98:]])
    with pytest.raises(StartupFailed, match=r"Token 97 is b'b' .* b'a' .*same vocabulary"):
        LlamaDraft(smaller, model, CONFIG)


def test_a_model_whose_state_cannot_be_cut_is_refused(model: LlamaModel, tmp_path: Path):
    with pytest.raises(StartupFailed, match="recurrent, hybrid"):
        LlamaDraft(LlamaModel(tiny_mamba(tmp_path / "mamba.gguf")), model, CONFIG)


def test_a_truncated_model_has_the_same_vocabulary_and_less_layers(model: LlamaModel, tmp_path: Path):
    source = tiny_qwen2(tmp_path / "tiny.gguf")
    truncate(source, tmp_path / "all.gguf", range(LAYERS))
    truncate(source, tmp_path / "one.gguf", [LAYERS - 1])
    whole, one = LlamaModel(tmp_path / "all.gguf"), LlamaModel(tmp_path / "one.gguf")
    assert one.vocabulary == whole.vocabulary == model.vocabulary
    assert [llama_cpp.llama_model_n_layer(each.pointer) for each in (whole, one)] == [LAYERS, 1]
    answers = [Bench(LlamaCppEngine(each, CONFIG)).ask(PROMPT, 12).tokens for each in (model, whole, one)]
    assert answers[0] == answers[1] != answers[2]
    assert END_TOKEN in one.vocabulary.eos
    with pytest.raises(ValueError, match="layers 0 to 1"):
        truncate(source, tmp_path / "none.gguf", [LAYERS])
