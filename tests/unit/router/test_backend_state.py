from __future__ import annotations

import math

import pytest

from phaseroute.v1 import inference_pb2 as pb
from router_service.backend import State, as_candidate
from router_service.ledger import Pending
from router_service.prompt_size import prompt_size
from router_service.snapshot import Snapshot
from service_kit.requests import ChatPrompt, ChatTurn, TextPrompt, TokenPrompt
from tests.unit.router.router_values import backend, rng, status

NOTHING = Pending(0, 0, 0)


def test_life_of_a_backend():
    made = backend("gpu")
    assert (made.state, made.detail) == (State.CONNECTING, "no Status from gpu:1 yet")
    made.lose("UNAVAILABLE: connection refused")
    assert (made.state, made.detail) == (State.CONNECTING, "UNAVAILABLE: connection refused")
    assert made.hear(Snapshot.of(status()), now_s=10.0)
    assert (made.state, made.detail) == (State.SERVING, "")
    assert made.status_age_s(12.5) == 2.5
    made.lose("no Status for 5 s")
    assert (made.state, made.detail) == (State.UNREACHABLE, "no Status for 5 s")
    made.hear(Snapshot.of(status(draining=True, sequence=2)), now_s=20.0)
    assert made.state is State.DRAINING


def test_an_older_sequence_of_the_same_incarnation_changes_nothing():
    made = backend("gpu", status(("r", 10, 10), sequence=5))

    assert not made.hear(Snapshot.of(status(sequence=4)), now_s=9.0)

    assert made.snapshot.queued == 1
    assert made.status_age_s(10.0) == 10.0


def test_an_equal_sequence_is_a_heartbeat():
    made = backend("gpu", status(sequence=5))

    assert made.hear(Snapshot.of(status(sequence=5)), now_s=9.0)
    assert made.status_age_s(10.0) == 1.0


def test_a_new_incarnation_replaces_whatever_its_sequence():
    made = backend("gpu", status(incarnation="first", sequence=500))

    assert made.hear(Snapshot.of(status(incarnation="second", sequence=1)), now_s=1.0)
    assert made.snapshot.incarnation == "second"


def test_snapshot_sums_active_and_queued():
    snapshot = Snapshot.of(status(("a", 0, 30), ("b", 20, 100), ("", 7, 50)))

    assert (snapshot.active, snapshot.queued) == (1, 2)
    assert (snapshot.waiting_prefill_tokens, snapshot.waiting_decode_tokens) == (27, 180)
    assert snapshot.attempt_ids == {"a", "b"}


def test_snapshot_tells_origin_tokenizer_and_precision_apart():
    snapshot = Snapshot.of(status(fingerprint="origin", tokenizer="tok", precision="bf16"))

    assert (snapshot.fingerprint, snapshot.tokenizer_fingerprint, snapshot.precision) == ("origin", "tok", "bf16")


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_snapshot_takes_no_rate_that_cannot_divide(rate):
    message = status()
    message.isolated_rates.decode_tokens_per_s = rate

    assert Snapshot.of(message).rates is None


def test_snapshot_without_rates():
    message = status()
    message.ClearField("isolated_rates")

    assert Snapshot.of(message).rates is None


@pytest.mark.parametrize(
    ("running", "booked", "shown"), [(0, 0, (0, 0)), (1, 2, (3, 0)), (3, 2, (4, 1)), (4, 2, (4, 2))]
)
def test_bookings_fill_the_batch_before_the_queue(running, booked, shown):
    snapshot = Snapshot.of(status(*((str(i), 0, 10) for i in range(running))))

    made = as_candidate("gpu", snapshot, Pending(booked, 100, 50), last_turn=1, status_age_s=0.0, prompt_tokens=8)

    assert (made.active, made.queued) == shown
    assert (made.waiting_prefill_tokens, made.waiting_decode_tokens) == (100, 10 * running + 50)


def test_a_candidate_shows_how_it_holds_its_weights():
    made = as_candidate(
        "gpu", Snapshot.of(status(precision="bf16")), NOTHING, last_turn=1, status_age_s=0.0, prompt_tokens=8
    )

    assert made.precision == "bf16"


def test_a_queue_that_does_not_move_up_keeps_bookings_queued():
    snapshot = Snapshot.of(status(("a", 0, 10), ("b", 9, 10), ("c", 9, 10), ("d", 9, 10)))

    made = as_candidate("gpu", snapshot, Pending(1, 1, 1), last_turn=1, status_age_s=0.0, prompt_tokens=8)

    assert (made.active, made.queued) == (1, 4)


def test_prompt_sizes():
    ids = prompt_size(TokenPrompt((1, 2, 3)))
    assert ids.exact
    assert (ids.guess_tokens, ids.at_most_tokens) == (3, 3)

    text = prompt_size(TextPrompt("é" * 100))
    assert not text.exact
    assert (text.guess_tokens, text.at_least_tokens) == (50, 1)
    assert text.at_most_tokens >= 200

    chat = prompt_size(ChatPrompt((ChatTurn("user", "hello"),)))
    assert chat.guess_tokens > 2
    assert chat.at_most_tokens is None


def test_text_guess_is_within_its_bounds():
    for length in [1, 2, 5, *(rng().randrange(1, 5000) for _ in range(50))]:
        size = prompt_size(TextPrompt("x" * length))
        assert size.at_least_tokens <= size.guess_tokens <= size.at_most_tokens


def test_wire_status_is_kept_for_showing_on():
    message = status(("a", 1, 2))

    assert Snapshot.of(message).wire == message
    assert isinstance(Snapshot.of(message).wire, pb.BackendStatus)
