from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from backend_service.speculation.prompt_lookup import PromptLookup

TOKENS = st.lists(st.integers(0, 2), max_size=12)
"""Few different tokens, so that n-grams come back."""


def searched(known: Sequence[int], ngram_tokens: int, count: int) -> list[int]:
    """The guess by going through the whole text backwards."""
    last = list(known[-ngram_tokens:])
    for place in range(len(known) - 1, ngram_tokens - 1, -1):
        if list(known[place - ngram_tokens : place]) == last:
            period = len(known) - place
            longer = list(known)
            for _ in range(count):
                longer.append(longer[-period])
            return longer[len(known) :]
    return []


class AgainstASearch(RuleBasedStateMachine):
    """The index, fed piece by piece, against a search of the text as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, list[int]] = {}

    @initialize(ngram_tokens=st.integers(1, 4))
    def make(self, ngram_tokens: int) -> None:
        self.ngram_tokens = ngram_tokens
        self.lookup = PromptLookup(ngram_tokens=ngram_tokens)

    @rule(handle=st.integers(0, 3), tokens=TOKENS)
    def start_anew(self, handle: int, tokens: list[int]) -> None:
        if handle in self.known:
            self.lookup.forget(handle)
        self.lookup.start(handle, tokens)
        self.known[handle] = list(tokens)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), tokens=TOKENS)
    def accept(self, data: st.DataObject, tokens: list[int]) -> None:
        handle = data.draw(st.sampled_from(sorted(self.known)))
        self.lookup.accept(handle, tokens)
        self.known[handle] += tokens

    @precondition(lambda self: self.known)
    @rule(data=st.data(), count=st.integers(0, 9))
    def guess(self, data: st.DataObject, count: int) -> None:
        handles = data.draw(st.sets(st.sampled_from(sorted(self.known))))
        found = {handle: searched(self.known[handle], self.ngram_tokens, count) for handle in handles}
        guesses = self.lookup.guess(dict.fromkeys(handles, count))
        assert guesses == {handle: tokens for handle, tokens in found.items() if tokens}


TestAgainstASearch = AgainstASearch.TestCase
TestAgainstASearch.settings = settings(max_examples=60, stateful_step_count=30)


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_what_is_known_matters_and_not_how_it_came(first: list[int], second: list[int], ngram_tokens: int):
    pieces, whole = PromptLookup(ngram_tokens=ngram_tokens), PromptLookup(ngram_tokens=ngram_tokens)
    pieces.start(0, first)
    for token in second:
        pieces.accept(0, [token])
    whole.start(0, first + second)
    assert pieces.guess({0: 5}) == whole.guess({0: 5})


@pytest.mark.parametrize(
    ("known", "guess"),
    [
        pytest.param([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6], id="what followed"),
        pytest.param([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], [8, 1, 2], id="the most recent time"),
        pytest.param([9, 9, 9, 9], [9, 9, 9], id="over the end of the text"),
        pytest.param([1, 2, 1, 2, 1], [2, 1, 2], id="a period of two"),
        pytest.param([1, 2, 3, 4], None, id="nothing occurred before"),
        pytest.param([1, 2], None, id="shorter than the n-gram"),
    ],
)
def test_guess(known: list[int], guess: list[int] | None):
    lookup = PromptLookup(ngram_tokens=3)
    lookup.start(0, known)
    assert lookup.guess({0: 3}) == ({0: guess} if guess else {})


class CountingIndex(dict[tuple[int, ...], int]):
    writes = 0

    def __setitem__(self, key: tuple[int, ...], value: int) -> None:
        self.writes += 1
        super().__setitem__(key, value)


def test_a_token_costs_one_index_entry_and_a_sequence_leaves_none():
    lookup = PromptLookup(ngram_tokens=4)
    lookup.start(0, range(1000))
    index = lookup._sequences[0].followed_at = CountingIndex(lookup._sequences[0].followed_at)
    assert len(index) == 1000 - 4
    for token in range(50):
        lookup.accept(0, [token])
    assert index.writes == 50
    lookup.forget(0)
    assert not lookup._sequences
