"""What a fleet makes of attempts that ended, without a network."""

from __future__ import annotations

import asyncio

import pytest

from router_service.breaker import BreakerLimits, BreakerState
from router_service.fleet import Fleet
from router_service.ledger import Ledger
from router_service.snapshot import Snapshot
from service_kit.errors import UpstreamFailed, to_status
from service_kit.faults import InvalidRequest, Unavailable, UnknownName
from tests.unit.router.router_values import rng, status


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fleet(clock: Clock | None = None, **heard) -> tuple[Fleet, Ledger]:
    ledger = Ledger()
    made = Fleet(
        dict.fromkeys(heard, "127.0.0.1:1"),
        ledger,
        breaker=BreakerLimits(jitter=0.0),
        rng=rng(),
        clock=clock or Clock(),
    )
    for name, message in heard.items():
        made.backends[name].hear(Snapshot.of(message), 0.0)
    return made, ledger


def broken() -> UpstreamFailed:
    return UpstreamFailed(to_status(Unavailable("gone")))


def state(over: Fleet, name: str = "a") -> BreakerState:
    return over.breaker(over.backends[name]).state


def fail(over: Fleet, times: int = 3, incarnation: str = "first") -> None:
    for _ in range(times):
        over.attempt_over("a", incarnation, broken())


async def test_failures_open_the_breaker_and_an_answer_closes_it():
    over, ledger = fleet(a=status())
    lease = ledger.book("a", "first", prompt_tokens=1, reusable_tokens=0, max_new_tokens=1)
    fail(over)
    assert state(over) is BreakerState.OPEN
    over.released(lease, answered=True)
    assert state(over) is BreakerState.CLOSED


async def test_what_counts_for_nothing():
    over, ledger = fleet(a=status())
    fail(over, 2)
    for _ in range(10):
        over.attempt_over("a", "first", None)
        over.attempt_over("a", "first", UpstreamFailed(to_status(InvalidRequest("prompt", "no"))))
    over.released(ledger.book("a", "first", prompt_tokens=1, reusable_tokens=0, max_new_tokens=1), answered=False)
    assert over.breaker(over.backends["a"]).failures == 2


async def test_an_earlier_process_is_held_against_nobody():
    over, ledger = fleet(a=status())
    old = ledger.book("a", "first", prompt_tokens=1, reusable_tokens=0, max_new_tokens=1)
    over._on_status(over.backends["a"], status(incarnation="second"))
    fail(over, 10)
    assert over.breaker(over.backends["a"]).failures == 0
    fail(over, incarnation="second")
    over.released(old, answered=True)
    assert state(over) is BreakerState.OPEN
    over._on_status(over.backends["a"], status(incarnation="third"))
    assert state(over) is BreakerState.CLOSED


async def test_a_draining_backend_breaks_off_what_it_has_and_is_not_broken():
    over, _ = fleet(a=status())
    over.drain("a", undo=False)
    fail(over, 10)
    over.drain("a", undo=True)
    assert over.breaker(over.backends["a"]).failures == 0


async def test_a_booking_takes_the_trials_place_and_its_end_gives_it_back():
    clock = Clock()
    over, ledger = fleet(clock, a=status())
    fail(over)
    clock.now_s += 1
    assert state(over) is BreakerState.HALF_OPEN
    lease = ledger.book("a", "first", prompt_tokens=1, reusable_tokens=0, max_new_tokens=1)
    over.booked(lease)
    assert over.backends["a"].breaker.refusal(clock.now_s)
    over.released(lease, answered=False)
    assert over.backends["a"].breaker.refusal(clock.now_s) == ""


async def test_backends_in_use_are_those_that_get_requests():
    over, _ = fleet(a=status(), b=status(), c=status(draining=True))
    assert [each.name for each in over.in_use] == ["a", "b"]
    fail(over)
    assert [each.name for each in over.in_use] == ["b"]
    over.drain("b", undo=False)
    assert [each.name for each in over.in_use] == ["a"]


@pytest.mark.parametrize(
    ("silent_s", "prefill_tokens", "lost"),
    [(4.0, 0, False), (7.0, 0, True), (7.0, 40_000, False), (60.0, 40_000, True)],
)
async def test_what_runs_on_a_hung_backend_is_given_up_and_on_a_busy_one_is_not(silent_s, prefill_tokens, lost):
    """40,000 tokens take 16 s at its rate."""
    over, _ = fleet(a=status())
    waiting = asyncio.create_task(over.until_lost("a", "first"))
    await asyncio.sleep(0)
    message = status(("x", prefill_tokens, 10), sequence=2, seconds_since_progress=silent_s)
    over._on_status(over.backends["a"], message)
    await asyncio.sleep(0)
    assert waiting.done() == lost
    waiting.cancel()


async def test_a_grace_that_is_over_is_over_until_the_drain_is_taken_back():
    over, _ = fleet(a=status())
    over.drain("a", undo=False, grace_s=0)
    why = await over.until_lost("a", "first")
    assert why == "Backend a is drained, and its grace of 0 s is over"
    over.drain("a", undo=True)
    assert over.backends["a"].why_lost("first") == ""


async def test_only_backends_that_are_there_can_be_drained():
    over, _ = fleet(a=status())
    with pytest.raises(UnknownName):
        over.drain("b", undo=False)
    with pytest.raises(InvalidRequest, match="grace_s"):
        over.drain("a", undo=False, grace_s=-1)
    assert not over.backends["a"].drained
