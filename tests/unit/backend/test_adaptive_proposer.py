from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backend_service.speculation.adaptive import FIRST_GUESSES, LONGEST_PAUSE_STEPS, AdaptiveProposer

WANTED = 8


class Counting:
    """Guesses as many zeros as it may, of which there may be fewer; remembers what it was asked and told."""

    name = "counting"

    def __init__(self) -> None:
        self.at_most = 100
        self.asked: list[Mapping[int, int]] = []
        self.told: list[object] = []

    def start(self, handle: int, tokens: Sequence[int]) -> None:
        self.told.append(("start", handle, tokens))

    def accept(self, handle: int, tokens: Sequence[int]) -> None:
        self.told.append(("accept", handle, tokens))

    def guess(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        self.asked.append(wanted)
        return {handle: [0] * min(count, self.at_most) for handle, count in wanted.items() if self.at_most}

    def forget(self, handle: int) -> None:
        self.told.append(("forget", handle))


class OneSequence:
    """One sequence, step by step."""

    def __init__(self) -> None:
        self.inner = Counting()
        self.proposer = AdaptiveProposer(self.inner)
        self.proposer.start(1, [5])

    def step(self, right: int, wanted: int = WANTED) -> int:
        """How many were guessed; at most `right` of them prove right."""
        guessed = len(self.proposer.guess({1: wanted}).get(1, ()))
        self.proposer.accept(1, [0] * (min(right, guessed) + 1))
        return guessed


def test_all_right_doubles_up_to_what_is_wanted():
    sequence = OneSequence()
    assert [sequence.step(right=99) for _ in range(4)] == [FIRST_GUESSES, 4, WANTED, WANTED]


def test_a_wrong_guess_lowers_to_what_was_right():
    sequence = OneSequence()
    assert [sequence.step(right) for right in (99, 99, 3, 99, 99)] == [2, 4, 8, 3, 6]


def test_a_guess_that_was_shorter_than_allowed_does_not_lower_the_limit():
    sequence = OneSequence()
    sequence.step(99), sequence.step(99)
    assert sequence.step(right=99, wanted=1) == 1
    assert sequence.step(right=99) == WANTED


def test_none_right_pauses_longer_each_time_up_to_a_bound():
    sequence = OneSequence()
    guessed = [sequence.step(right=0) for _ in range(100)]
    places = [step for step, count in enumerate(guessed) if count]
    pauses = [later - earlier - 1 for earlier, later in pairwise(places)]
    assert pauses[:6] == [1, 2, 4, 8, LONGEST_PAUSE_STEPS, LONGEST_PAUSE_STEPS]
    assert {guessed[place] for place in places[1:]} == {1}


def test_a_right_guess_ends_the_row_of_pauses():
    sequence = OneSequence()
    for _ in range(2):
        assert sequence.step(right=0)
        assert not sequence.step(right=0)
        assert sequence.step(right=1)


def test_who_guessed_nothing_is_not_judged():
    sequence = OneSequence()
    sequence.inner.at_most = 0
    for _ in range(5):
        assert sequence.step(right=0) == 0
    sequence.inner.at_most = 100
    assert sequence.step(right=99) == FIRST_GUESSES


def test_the_other_proposer_hears_everything_and_is_asked_for_no_empty_guesses():
    sequence = OneSequence()
    sequence.step(right=0)  # then a pause
    sequence.step(right=0)
    sequence.proposer.forget(1)
    assert sequence.inner.asked == [{1: FIRST_GUESSES}, {}]
    assert sequence.inner.told == [("start", 1, [5]), ("accept", 1, [0]), ("accept", 1, [0]), ("forget", 1)]
    assert sequence.proposer.name == "counting"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))))
def test_never_more_than_wanted_and_each_sequence_for_itself(steps: list[tuple[int, int, int]]):
    alone, proposer = OneSequence(), AdaptiveProposer(Counting())
    proposer.start(1, [5])
    proposer.start(2, [5])
    for wanted, right, right_of_other in steps:
        guesses = proposer.guess({2: WANTED, 1: wanted})
        assert len(guesses.get(1, ())) <= wanted
        assert len(guesses.get(2, ())) <= WANTED
        proposer.accept(2, [0] * (min(right_of_other, len(guesses.get(2, ()))) + 1))
        proposer.accept(1, [0] * (min(right, len(guesses.get(1, ()))) + 1))
        assert alone.step(right, wanted) == len(guesses.get(1, ()))
