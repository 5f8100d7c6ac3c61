"""llama.cpp and MLX on the same model say the same, as far as their arithmetic allows."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core", exc_type=ImportError)

from benchmarks.engine_agreement import PROMPTS, Answer, compare, numerical_difference

TOKENS = 16


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    return compare([PROMPTS[index] for index in (0, 2, 6, 7, 8)], TOKENS)


def test_the_comparison_shows_something(answers: list[Answer]):
    difference = numerical_difference(answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    assert sum(gap > difference for gap in gaps) > len(gaps) / 2, "hardly any place is sure enough to compare"
    assert len({answer.mlx for answer in answers}) == len(answers)
    assert {len(tokens) for answer in answers for tokens in (answer.mlx, answer.llama)} == {TOKENS}


def test_answers_agree_up_to_the_first_place_in_doubt(answers: list[Answer]):
    difference = numerical_difference(answers)
    for answer in answers:
        assert answer.agreed_tokens() >= answer.sure_tokens(difference)


def test_the_best_token_is_the_same_wherever_the_gap_exceeds_the_numerical_difference(answers: list[Answer]):
    difference = numerical_difference(answers)
    for answer in answers:
        for gap, same in zip(answer.gaps, answer.same_best, strict=True):
            assert same or gap <= difference


def test_most_tokens_are_said_alike(answers: list[Answer]):
    """A wrong cache, position or weight would show here at once."""
    same = [same for answer in answers for same in answer.same_best]
    assert sum(same) >= 0.9 * len(same)
