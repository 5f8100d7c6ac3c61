"""The books of a chaos run: what is right for a request, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phaseroute.v1 import inference_pb2 as pb
from tests.chaos.ledger import Ending, Entry, Ledger, Outcome, RouterTrouble, Verdict, judge
from tests.chaos.reference import Answer
from tests.chaos.workload import PlannedRequest

PLANNED = PlannedRequest(7, "ada", "hello", 3)
ANSWER = Answer((1, 2, 3), "abc", pb.FINISH_REASON_LENGTH, 5)


def finished(reason=pb.FINISH_REASON_LENGTH, prompt_tokens=5, generated_tokens=3):
    usage = pb.Usage(prompt_tokens=prompt_tokens, generated_tokens=generated_tokens)
    return pb.Finished(finish_reason=reason, usage=usage)


WELL = Ending("OK", "", (1, 2, 3), "abc", finished(), 0, 10.0, 11.0, 0.1)
BROKE_OFF = replace(WELL, code="UNAVAILABLE", message="gone", token_ids=(1, 2), text="ab", finished=None)
NOTHING = replace(BROKE_OFF, token_ids=(), text="")


def outcome(ending, *, trouble=RouterTrouble.NONE, **planned):
    return judge(replace(PLANNED, **planned), ANSWER, ending, trouble).outcome


def problem(ending, **planned):
    verdict = judge(replace(PLANNED, **planned), ANSWER, ending, RouterTrouble.NONE)
    assert verdict.outcome is Outcome.BROKEN
    return verdict.problem


def test_whole_answer_is_right():
    assert outcome(WELL) is Outcome.ANSWERED


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token_ids": (1, 9, 3)}, "token 1 of 3 is wrong"),
        ({"token_ids": (1, 2, 2, 3)}, "token 2 of 3 is wrong"),
        ({"token_ids": (1, 2, 3, 3)}, "too many: 4 came"),
        ({"token_ids": (1, 2)}, "ends after 2 of 3"),
        ({"text": "ab"}, "ends after 3 of 3"),
        ({"text": "abbc"}, "the text is not the tokens' own"),
        ({"after_last": 1}, "1 messages came after the last one"),
        ({"finished": None}, "without its last message"),
        ({"finished": finished(pb.FINISH_REASON_EOS)}, "finish reason"),
        ({"finished": finished(prompt_tokens=7)}, "(2, 7, 3)"),
        ({"finished": finished(generated_tokens=1)}, "(2, 5, 1)"),
    ],
)
def test_answer_that_is_not_the_undisturbed_one_is_broken(change, says):
    assert says in problem(replace(WELL, **change))


def test_nothing_of_an_answer_is_in_what_is_said():
    assert "abc" not in problem(replace(WELL, text="abbc"))


def test_error_for_no_reason_is_broken():
    assert problem(BROKE_OFF) == "UNAVAILABLE after 2 tokens: gone"
    assert "HUNG" in problem(replace(BROKE_OFF, code="HUNG"))
    assert "RESOURCE_EXHAUSTED" in problem(replace(NOTHING, code="RESOURCE_EXHAUSTED", retry_info=True))


def test_cancel_is_right_for_whoever_gives_up_and_for_nobody_else():
    cancelled = replace(BROKE_OFF, code="CANCELLED")
    assert outcome(cancelled, cancel_after_tokens=2) is Outcome.CANCELLED
    assert outcome(cancelled, cancel_after_s=0.1) is Outcome.CANCELLED
    assert "CANCELLED" in problem(cancelled)
    assert outcome(WELL, cancel_after_tokens=3) is Outcome.ANSWERED, "it was over before"


def test_deadline_passes_when_it_passes():
    late = replace(BROKE_OFF, code="DEADLINE_EXCEEDED")
    assert outcome(late, deadline_s=1.0) is Outcome.LATE
    assert "before it did" in problem(late, deadline_s=2.0)
    assert "DEADLINE_EXCEEDED" in problem(late)


def test_request_with_a_deadline_may_be_declined_with_retry_info_before_anything_came():
    declined = replace(NOTHING, code="RESOURCE_EXHAUSTED", retry_info=True)
    assert outcome(declined, deadline_s=1.0) is Outcome.DECLINED
    assert "RetryInfo" in problem(replace(declined, retry_info=False), deadline_s=1.0)
    assert "after 2 tokens" in problem(replace(BROKE_OFF, code="RESOURCE_EXHAUSTED", retry_info=True), deadline_s=1.0)


def test_router_that_restarts_may_refuse_and_must_end_what_it_has():
    assert outcome(NOTHING, trouble=RouterTrouble.RESTART) is Outcome.RESEND
    assert outcome(BROKE_OFF, trouble=RouterTrouble.RESTART) is Outcome.BROKEN


def test_router_that_is_killed_takes_its_streams_along():
    assert outcome(NOTHING, trouble=RouterTrouble.KILLED) is Outcome.RESEND
    assert outcome(BROKE_OFF, trouble=RouterTrouble.KILLED) is Outcome.INTERRUPTED
    wrong = replace(BROKE_OFF, token_ids=(2,))
    assert outcome(wrong, trouble=RouterTrouble.KILLED) is Outcome.BROKEN


def test_each_request_is_sent_and_ends_once():
    ledger = Ledger()
    entry = Entry(PLANNED, WELL, Verdict(Outcome.ANSWERED), 0)
    ledger.open(PLANNED)
    assert list(ledger.lost) == [7]
    ledger.close(entry)
    assert not ledger.lost
    assert not ledger.problems
    ledger.close(entry)
    ledger.open(PLANNED)
    assert ledger.problems == ["request 7 ended twice", "request 7 was sent twice"]


def test_broken_request_is_a_problem_of_the_run():
    ledger = Ledger()
    ledger.open(PLANNED)
    ledger.close(Entry(PLANNED, BROKE_OFF, Verdict(Outcome.BROKEN, "it is wrong"), 0))
    assert ledger.problems == ["request 7 (ada): it is wrong"]
