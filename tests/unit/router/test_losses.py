"""Who is told that what runs on a backend is to be given up, and when."""

from __future__ import annotations

import asyncio

import pytest

from router_service.losses import Losses
from router_service.snapshot import Snapshot
from tests.unit.router.router_values import backend, status


async def waiting(losses: Losses, made, incarnation: str = "first") -> asyncio.Task[str]:
    task = asyncio.create_task(losses.wait(made, incarnation))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def restart(made):
    made.hear(Snapshot.of(status(incarnation="second")), 1.0)


def lose(made):
    made.lose("no Status for 5 s", gone=True)


def stall(made):
    made.hear(Snapshot.of(status(sequence=2)), 1.0, stalled="makes no progress")


def end_of_grace(made):
    made.drain_over = "Backend gpu is drained, and its grace of 3 s is over"


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (restart, "Backend gpu was restarted"),
        (lose, "Backend gpu is lost: no Status for 5 s"),
        (stall, "Backend gpu makes no progress"),
        (end_of_grace, "Backend gpu is drained, and its grace of 3 s is over"),
    ],
)
async def test_all_that_wait_are_told_why_and_later_ones_at_once(happens, why):
    losses, made = Losses(), backend("gpu", status())
    tasks = [await waiting(losses, made) for _ in range(3)]
    happens(made)
    losses.tell(made)
    assert await asyncio.gather(*tasks) == [why] * 3
    assert await losses.wait(made, "first") == why
    assert len(losses) == 0


async def test_a_status_that_is_only_late_is_no_loss():
    losses, made = Losses(), backend("gpu", status())
    task = await waiting(losses, made)
    made.lose("its Status stream ended")
    losses.tell(made)
    made.hear(Snapshot.of(status(sequence=2)), 1.0)
    losses.tell(made)
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()


async def test_a_restart_is_told_to_those_on_the_old_process_only():
    losses, made = Losses(), backend("gpu", status())
    old = await waiting(losses, made)
    restart(made)
    new = await waiting(losses, made, "second")
    losses.tell(made)
    assert await old == "Backend gpu was restarted"
    assert not new.done()
    new.cancel()


async def test_who_stops_waiting_is_forgotten():
    losses, made = Losses(), backend("gpu", status())
    tasks = [await waiting(losses, made) for _ in range(100)]
    assert len(losses) == 100
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(losses) == 0


async def test_one_that_is_cancelled_as_it_is_told_disturbs_nobody():
    losses, made = Losses(), backend("gpu", status())
    gone, there = await waiting(losses, made), await waiting(losses, made)
    gone.cancel()
    lose(made)
    losses.tell(made)
    losses.tell(made)
    assert (await there).startswith("Backend gpu is lost")


async def test_the_end_of_the_router_is_told_to_everybody():
    losses = Losses()
    tasks = [await waiting(losses, backend(name, status())) for name in ("a", "b")]
    losses.tell_all("This router is stopping")
    assert await asyncio.gather(*tasks) == ["This router is stopping"] * 2
