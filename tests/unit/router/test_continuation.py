from __future__ import annotations

import grpc
import pytest

from router_service.continuation import Answer, BrokenOff, RelayLimits, why_not, worth_another
from router_service.failures import Failures
from service_kit.errors import MAX_MESSAGE_BYTES, UpstreamFailed, internal_status, to_status
from service_kit.faults import EngineFailed, Fault, InvalidRequest, Overloaded, Unavailable, UnknownName


def failed(fault: Fault) -> UpstreamFailed:
    return UpstreamFailed(to_status(fault))


def failures(*faults: Fault) -> Failures:
    made = Failures()
    for fault in faults:
        made.add("b", "first", failed(fault), 0.0)
    return made


def begun(*token_ids: int) -> Answer:
    answer = Answer((), arrived_s=0.0)
    answer.begin(1.0)
    answer.token_ids.extend(token_ids)
    return answer


def test_each_attempt_that_adds_to_a_begun_answer_is_a_continuation():
    answer = Answer((7, 8), arrived_s=0.5)
    assert not answer.begun
    assert answer.token_ids == [7, 8]

    answer.begin(1.0)
    assert answer.begun
    answer.begin(5.0)

    assert (answer.first_token_s, answer.continuations) == (1.0, 1)


BROKEN = [Unavailable("gone"), EngineFailed("broke")]
OWN_FAULT = [InvalidRequest("prompt", "no"), UnknownName("no")]


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize(("here", "anywhere"), [(False, False), (True, True), (False, True)])
def test_a_backends_own_trouble_is_worth_another_one_at_any_time(fault, here, anywhere):
    assert worth_another(failed(fault), here=here, anywhere=anywhere)


@pytest.mark.parametrize("fault", OWN_FAULT)
def test_a_request_is_at_fault_unless_somebody_took_it_before(fault):
    assert not worth_another(failed(fault), here=False, anywhere=False)
    assert not worth_another(failed(fault), here=True, anywhere=True)
    assert worth_another(failed(fault), here=False, anywhere=True)


def test_want_of_room_is_worth_another_only_before_the_first_token_there():
    full = failed(Overloaded("full", 1))

    assert worth_another(full, here=False, anywhere=False)
    assert worth_another(full, here=False, anywhere=True)
    assert not worth_another(full, here=True, anywhere=True)


def test_a_deadline_is_the_same_everywhere():
    status = internal_status("too late")
    status.code = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]

    assert not worth_another(UpstreamFailed(status), here=False, anywhere=True)


def test_limits():
    limits = RelayLimits(max_attempts=2, max_replayed_tokens=3)

    assert why_not(begun(1, 2, 3), failures(Unavailable("gone")), limits) == ""
    assert "2 failed attempts" in why_not(begun(1), failures(*2 * [Unavailable("gone")]), limits)
    assert "more than 3 tokens" in why_not(begun(1, 2, 3, 4), failures(Unavailable("gone")), limits)
    assert why_not(begun(1), failures(Unavailable("gone"), *5 * [Overloaded("full", 1)]), limits) == ""


def test_long_answer_of_another_router_may_be_asked_for_elsewhere_until_we_add_to_it():
    """Nothing was sent from here: whoever takes it has to compute it again anyway."""
    answer = Answer(range(10), arrived_s=0.0)

    assert why_not(answer, failures(Unavailable("gone")), RelayLimits(max_replayed_tokens=3)) == ""


def test_text_without_tokens_cannot_go_on():
    answer = begun()
    answer.traceable = False

    assert "without its token ids" in why_not(answer, failures(Unavailable("gone")), RelayLimits())


def test_broken_off_accounts_for_what_was_sent_and_says_what_to_do():
    fault = BrokenOff(begun(1), failures(Unavailable("Gone.")), "No backend can take this request: b is out")

    assert str(fault) == (
        "Backend b broke off after 1 token was sent (Gone), and the answer cannot go on elsewhere: "
        "No backend can take this request: b is out; send the request again to start over."
    )
    assert fault.metadata == {"generated_tokens": "1", "attempts": "1", "backend": "b"}


def test_broken_off_never_loses_its_end():
    fault = BrokenOff(begun(*range(99_999)), failures(Unavailable("long " * 200)), "because " * 200)

    assert len(str(fault).encode()) <= MAX_MESSAGE_BYTES
    assert to_status(fault).message.endswith("send the request again to start over.")
