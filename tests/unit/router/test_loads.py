"""From a Status, bookings and output lengths to the books that a forecast is played from."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_service.scheduling.base import Waiting
from backend_service.scheduling.fair import Fair
from phaseroute.v1 import inference_pb2 as pb
from router_service.forecast import Line
from router_service.ledger import Ledger
from router_service.lengths import LengthOutcome, make_lengths
from router_service.loads import MAX_RECKONED_S, Loads
from router_service.snapshot import Snapshot
from service_kit.requests import Priority
from tests.unit.router.router_values import status


def snapshot(**changes) -> Snapshot:
    """One decodes, one prefills, one waits; the step that runs began 20 ms before the Status."""
    message = status(
        step_rules=pb.StepRules(step_tokens=64, promote_batch_after_s=30.0),
        seconds_since_progress=0.02,
        scheduling_policy=changes.pop("order", "fcfs"),
    )
    message.step_model.CopyFrom(pb.StepModel(base_s=0.01, per_token_s=0.001, samples=50))
    shared = {"prompt_tokens": 516, "workload": "chat"}
    message.requests.add(
        phase=pb.REQUEST_PHASE_DECODE, remaining_decode_tokens=100, generated_tokens=28, context_tokens=543, **shared
    )
    message.requests.add(
        phase=pb.REQUEST_PHASE_PREFILL,
        remaining_prefill_tokens=16,
        remaining_decode_tokens=128,
        context_tokens=500,
        priority=pb.PRIORITY_BATCH,
        **shared,
    )
    message.requests.add(
        phase=pb.REQUEST_PHASE_QUEUED,
        remaining_prefill_tokens=20,
        remaining_decode_tokens=128,
        due_in_s=-1.5,
        ignore_eos=True,
        **shared,
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return Snapshot.of(message)


def load(books: Loads, heard: Snapshot, *bookings, now_s=100.0, received_at_s=100.0):
    return books.of("a", heard, bookings, now_s=now_s, received_at_s=received_at_s)


def test_every_request_stands_as_the_status_has_it():
    books = load(Loads(make_lengths("budget")), snapshot())
    decoding, prefilling = books.active
    (waiting,) = books.waiting
    assert (decoding.prefill_tokens, decoding.decode_tokens, decoding.context_tokens) == (0, 100, 543)
    assert (prefilling.prefill_tokens, prefilling.decode_tokens, prefilling.context_tokens) == (16, 128, 500)
    assert (waiting.prefill_tokens, waiting.decode_tokens, waiting.context_tokens) == (20, 128, 496)
    assert waiting.due_s == pytest.approx(-1.48)
    assert books.step_tokens == 64


def test_the_schedule_starts_where_the_running_step_did_and_now_is_as_late_as_the_status_is_old():
    books = load(Loads(make_lengths("budget")), snapshot(), now_s=100.25)
    assert books.running_s == pytest.approx(0.02)
    assert books.elapsed_s == pytest.approx(0.27)


def test_a_status_is_not_reckoned_on_for_ever():
    books = load(Loads(make_lengths("budget")), snapshot(), now_s=900.0)
    assert books.elapsed_s == pytest.approx(0.02 + MAX_RECKONED_S)


def test_bookings_join_when_they_were_made_and_not_before_the_running_step_ends():
    ledger = Ledger()
    earlier, later = (
        ledger.book("a", "first", prompt_tokens=50, reusable_tokens=10, max_new_tokens=8, now_s=now_s)
        for now_s in (99.9, 100.1)
    )
    books = load(Loads(make_lengths("budget")), snapshot(), earlier, later, now_s=100.2)
    first, second = books.waiting[1:]
    assert 0 < first.joined_s < 1e-5
    assert second.joined_s == pytest.approx(0.12)
    assert (first.prefill_tokens, first.context_tokens, first.decode_tokens, first.kv_tokens) == (40, 10, 8, 48)


def test_lengths_are_expected_ones_but_for_those_that_go_on_to_the_budget():
    lengths = make_lengths("history")
    for _ in range(200):
        lengths.observe(LengthOutcome("chat", 516, 128, 40, ended=True))
    books = load(Loads(lengths), snapshot())
    decoding, prefilling = books.active
    assert 12 <= decoding.decode_tokens < 20
    assert 40 <= prefilling.decode_tokens < 45
    assert books.waiting[0].decode_tokens == 128


def test_what_is_remembered_of_a_status_is_forgotten_when_lengths_change():
    lengths = make_lengths("history")
    books, heard = Loads(lengths), snapshot()
    before = load(books, heard).active
    assert load(books, heard).active is before
    for _ in range(50):
        lengths.observe(LengthOutcome("chat", 516, 128, 40, ended=True))
    assert load(books, heard).active[1].decode_tokens < before[1].decode_tokens


def test_batch_requests_have_their_weight():
    books = load(Loads(make_lengths("budget"), batch_weight=0.2), snapshot())
    assert [job.weight for job in books.jobs] == [1.0, 0.2, 1.0]


def test_a_status_without_a_step_model_gives_no_books():
    message = status()
    assert load(Loads(make_lengths("budget")), Snapshot.of(message)) is None


@pytest.mark.parametrize(
    ("line", "batch", "due_s"),
    [
        (Line("fcfs", 30.0, 100.0), True, 5.0),
        (Line("priority", 30.0, 100.0), True, 35.0),
        (Line("priority", 30.0, 100.0), False, 5.0),
        (Line("shortest_prefill_first", 30.0, 100.0), False, 7.0),
        (Line("shortest_prefill_first", 30.0, 0.0), False, 5.0),
        (Line("something new", 30.0, 100.0), True, 5.0),
    ],
)
def test_a_request_is_due_as_the_backends_policy_says(line, batch, due_s):
    assert line.due_s(5.0, 200, batch=batch) == due_s


def test_a_batch_booking_is_due_late_where_priorities_are_heeded():
    ledger = Ledger()
    lease = ledger.book(
        "a", "first", prompt_tokens=50, reusable_tokens=0, max_new_tokens=8, now_s=100.0, priority=Priority.BATCH
    )
    books = load(Loads(make_lengths("budget")), snapshot(order="priority"), lease)
    assert books.waiting[1].due_s == pytest.approx(0.02 + 30.0)


# A fair order: due times count seconds of service, and compare clients


def fair(*waiting: tuple[str, float]) -> Snapshot:
    """Waiting requests as (client, seconds from virtual time to its due), each 1 s of service alone."""
    message = status(scheduling_policy="fair")
    message.step_model.CopyFrom(pb.StepModel(base_s=0.01, per_token_s=0.001, samples=50))
    message.isolated_rates.CopyFrom(pb.IsolatedRates(prefill_tokens_per_s=100, decode_tokens_per_s=100))
    for client, due_in_s in waiting:
        message.requests.add(
            phase=pb.REQUEST_PHASE_QUEUED,
            remaining_prefill_tokens=50,
            remaining_decode_tokens=50,
            prompt_tokens=50,
            client=client,
            due_in_s=due_in_s,
        )
    return Snapshot.of(message)


def book(ledger: Ledger, client: str):
    return ledger.book("a", "first", prompt_tokens=50, reusable_tokens=0, max_new_tokens=50, now_s=100.0, client=client)


def order(books, client: str) -> list[int]:
    """Places of the waiting jobs in order of admission; -1 is one more request of that client."""
    own_s = books.line.due_s(books.elapsed_s, 50, batch=False, client=client)
    dues = [(job.due_s, place) for place, job in enumerate(books.waiting)] + [(own_s, len(books.waiting))]
    return [place if place < len(books.waiting) else -1 for _, place in sorted(dues)]


def test_a_client_with_nothing_waiting_goes_ahead_of_those_due_later():
    books = load(Loads(make_lengths("budget")), fair(("flood", 1.0), ("flood", 2.0), ("flood", 3.0)))
    assert order(books, "other") == [-1, 0, 1, 2]
    assert order(books, "flood") == [0, 1, 2, -1]


def test_a_clients_next_request_goes_behind_its_own_by_their_cost():
    books = load(Loads(make_lengths("budget")), fair(("a", 0.0), ("b", 0.5), ("b", 1.5), ("b", 2.5)))
    assert order(books, "a") == [0, 1, -1, 2, 3]


def test_bookings_go_behind_their_own_clients_too():
    ledger = Ledger()
    leases = [book(ledger, client) for client in ("a", "b", "a")]
    books = load(Loads(make_lengths("budget")), fair(), *leases)
    assert [job.due_s for job in books.waiting] == pytest.approx([0.0, 0.0, 1.0])
    assert order(books, "b") == [0, 1, 2, -1]
    assert order(books, "c") == [0, 1, -1, 2]


def test_with_one_client_fair_is_first_come_first_served():
    ledger = Ledger()
    books = load(Loads(make_lengths("budget")), fair(("", 0.5), ("", 1.5)), *(book(ledger, "") for _ in range(3)))
    assert order(books, "") == [0, 1, 2, 3, 4, -1]


ARRIVALS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 90), st.booleans()), min_size=1, max_size=25)


@settings(deadline=None)
@given(ARRIVALS, st.sampled_from("abcd"))
def test_a_request_is_put_where_the_backends_own_policy_puts_it(arrivals, client):
    """Requests of 10 prompt tokens arrive, some of them when another is admitted; one client has never been there. A
    client of which something was admitted and nothing waits may have to wait for what it had: no Status tells."""
    policy, waiting = Fair(100, 100), []
    for number, (whose, budget, admit) in enumerate(arrivals):
        due_s = policy.place(str(number), Waiting(10, budget, Priority.INTERACTIVE, client=whose))
        waiting.append((due_s, number, whose, budget))
        if admit:
            waiting.sort()
            policy.leave(str(waiting.pop(0)[1]), admitted=True)
            dues = policy.moved()
            waiting = [(dues.get(str(each[1]), each[0]), *each[1:]) for each in waiting]
    if client not in {whose for _, _, whose, _ in waiting}:
        client = "d"
    heard = status(scheduling_policy="fair")
    heard.step_model.CopyFrom(pb.StepModel(base_s=0.01, per_token_s=0.001, samples=50))
    heard.isolated_rates.CopyFrom(pb.IsolatedRates(prefill_tokens_per_s=100, decode_tokens_per_s=100))
    for due_s, _, whose, budget in sorted(waiting):
        heard.requests.add(
            phase=pb.REQUEST_PHASE_QUEUED,
            remaining_prefill_tokens=10,
            remaining_decode_tokens=budget,
            client=whose,
            due_in_s=due_s - policy.virtual_s,
        )
    line = load(Loads(make_lengths("budget")), Snapshot.of(heard)).line
    due_s = policy.place("own", Waiting(10, 5, Priority.INTERACTIVE, client=client))
    assert line.due_s(0.0, 10, batch=False, client=client) == pytest.approx(due_s - policy.virtual_s)


def test_an_answer_that_goes_on_is_expected_to_end_as_one_of_its_kind():
    lengths = make_lengths("history")
    for _ in range(200):
        lengths.observe(LengthOutcome("chat", 50, 128, 40, ended=True))
    lease = Ledger().book(
        "a", "first", prompt_tokens=80, reusable_tokens=0, max_new_tokens=98, workload="chat", generated_tokens=30
    )
    books = load(Loads(lengths), snapshot(), lease)
    job = books.waiting[-1]
    assert (job.prefill_tokens, job.kv_tokens) == (80, 178)
    assert 10 <= job.decode_tokens < 20
