"""Who is taken and who gives way where all places are taken."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_service.places import QUEUED_CONTEXTS, Place, Places, QueueLimits, Shortage

BATCH = 2


def places(max_queued=4, max_queued_tokens=0, held=()) -> Places:
    books = Places(QueueLimits(BATCH, max_queued, max_queued_tokens))
    for index, (client, tokens) in enumerate(held):
        books.take(f"{client}{index}", Place(client, 1.0, tokens))
    return books


def ask(books, client, tokens=100, *, weight=1.0, active=()):
    """(taken, who gave way), with books kept as the runner keeps them."""
    place = Place(client, weight, tokens)
    shortage = books.shortage(place, active, batch=BATCH)
    losers = books.giving_way(place, active, shortage) if shortage else ()
    for loser in losers:
        books.leave(loser)
    return (not shortage or bool(losers)), losers


def test_the_default_bound_is_by_the_context():
    assert QueueLimits(1, 1, None).known(1000).max_queued_tokens == QUEUED_CONTEXTS * 1000
    assert QueueLimits(1, 1, 7).known(1000).max_queued_tokens == 7
    assert QueueLimits(1, 1, 0).known(1000).max_queued_tokens == 0


def test_there_is_room_up_to_the_number_of_requests():
    books = places(held=[("a", 100)] * 5)
    assert ask(books, "a") == (True, ())
    books.take("new", Place("a", 1.0, 100))
    assert books.shortage(Place("a", 1.0, 100), (), batch=BATCH) == Shortage(1)
    books.leave("new")
    books.leave("never here")
    assert ask(books, "a") == (True, ())


def test_tokens_that_wait_are_bounded_and_those_in_the_batch_are_not():
    books = places(max_queued=100, max_queued_tokens=250, held=[("a", 1000), ("a", 1000), ("a", 100), ("a", 100)])
    active = ("a0", "a1")
    assert books.shortage(Place("a", 1.0, 50), active, batch=BATCH) == Shortage()
    assert books.shortage(Place("a", 1.0, 80), active, batch=BATCH) == Shortage(0, 30)
    assert books.shortage(Place("a", 1.0, 80), ("a0",), batch=BATCH) == Shortage(0, 1000 + 200 + 80 - 250)


def test_a_request_larger_than_the_bound_may_wait_alone_and_start_at_once():
    books = places(max_queued=100, max_queued_tokens=250, held=[("a", 100), ("a", 100)])
    assert not books.shortage(Place("a", 1.0, 9999), ("a0", "a1"), batch=BATCH)
    assert not places(max_queued_tokens=250).shortage(Place("a", 1.0, 9999), (), batch=BATCH)
    books.take("waits", Place("a", 1.0, 100))
    assert books.shortage(Place("a", 1.0, 9999), ("a0", "a1"), batch=BATCH)
    assert not books.shortage(Place("a", 1.0, 9999), ("a0", "a1"), batch=4)  # a place in the batch is free


def test_no_bound_on_tokens():
    assert not places(max_queued_tokens=0, held=[("a", 10**9)] * 5).shortage(Place("a", 1.0, 10**9), (), batch=BATCH)


def test_one_client_alone_is_refused_when_all_is_taken():
    assert ask(places(held=[("a", 100)] * 6), "a") == (False, ())


def test_the_newest_of_whoever_holds_most_gives_way_to_another_client():
    books = places(held=[("a", 100), ("a", 100), ("a", 100), ("b", 100), ("a", 100), ("a", 100)])
    assert ask(books, "c", active=("a0", "a1")) == (True, ("a5",))


def test_those_in_the_batch_never_give_way():
    books = places(max_queued=0, held=[("a", 100)] * 2)
    assert ask(books, "b", active=("a0", "a1")) == (False, ())


def test_as_many_give_way_as_their_tokens_are_needed():
    books = places(max_queued=100, max_queued_tokens=1000, held=[("a", 100)] * 12)
    taken, losers = ask(books, "b", 250, active=("a0", "a1"))
    assert (taken, losers) == (True, ("a11", "a10", "a9"))


def test_nobody_is_put_below_who_comes():
    books = places(max_queued=100, max_queued_tokens=1000, held=[("a", 10), ("a", 10), ("a", 1000)])
    assert ask(books, "b", 250, active=("a0", "a1")) == (False, ())


def test_a_client_of_three_times_the_weight_holds_three_times_as_much():
    books = places(max_queued=6)
    for turn in range(20):
        for client, weight in (("one", 1.0), ("three", 3.0)):
            if ask(books, client, weight=weight)[0]:
                books.take(f"{client} {turn}", Place(client, weight, 100))
    assert Counter(place.client for place in books._held.values()) == {"one": 2, "three": 6}


@pytest.mark.parametrize("bound", [{"max_queued": 10}, {"max_queued": 1000, "max_queued_tokens": 1200}])
@given(askers=st.lists(st.sampled_from("abc"), min_size=150, max_size=300))
def test_bounds_hold_and_whoever_keeps_asking_gets_an_equal_part(bound, askers):
    books = places(**bound)
    for index, client in enumerate([*askers, *"abc" * 12]):
        if ask(books, client)[0]:
            books.take(str(index), Place(client, 1.0, 100))
        assert len(books) <= 12
    assert Counter(place.client for place in books._held.values()) == {"a": 4, "b": 4, "c": 4}
