from __future__ import annotations

from router_service.decision import ProbeOutcome
from router_service.probe import Answer, ProbeReport
from router_service.prompt_size import PromptSize, prompt_size
from service_kit.requests import TokenPrompt
from tests.unit.router.router_values import candidate

GUESS = PromptSize(guess_tokens=40, at_least_tokens=1, at_most_tokens=176)


def report(size=GUESS, outcomes=None, **answers: Answer) -> ProbeReport:
    answered = dict.fromkeys(answers, ProbeOutcome.ANSWERED)
    return ProbeReport(size, {**answered, **(outcomes or {})}, answers, {})


def test_an_answer_is_taken_as_it_is():
    filled = report(gpu=Answer(30, 20)).fill(candidate("gpu"))

    assert (filled.prompt_tokens, filled.reusable_tokens, filled.prompt_tokens_estimated) == (30, 20, False)
    assert filled.probe is ProbeOutcome.ANSWERED


def test_no_answer_counts_no_prefix_and_borrows_the_length():
    filled = report(gpu=Answer(30, 20), outcomes={"cpu": ProbeOutcome.LATE}).fill(candidate("cpu"))

    assert (filled.prompt_tokens, filled.reusable_tokens, filled.prompt_tokens_estimated) == (30, 0, True)
    assert filled.probe is ProbeOutcome.LATE


def test_without_any_answer_the_length_is_guessed():
    made = report(outcomes={"cpu": ProbeOutcome.FAILED})

    filled = made.fill(candidate("cpu"))

    assert made.counted_tokens is None
    assert (filled.prompt_tokens, filled.prompt_tokens_estimated, filled.probe) == (40, True, ProbeOutcome.FAILED)


def test_token_ids_need_no_guess():
    made = report(size=prompt_size(TokenPrompt((5, 6, 7))), outcomes={"cpu": ProbeOutcome.LATE})

    filled = made.fill(candidate("cpu"))

    assert made.counted_tokens == 3
    assert (filled.prompt_tokens, filled.prompt_tokens_estimated) == (3, False)


def test_who_was_not_asked_is_marked_so():
    assert report(gpu=Answer(30, 20)).fill(candidate("cpu")).probe is ProbeOutcome.SKIPPED
