from __future__ import annotations

import asyncio

from router_service.feed import Feed


async def test_every_listener_hears_everything_in_order():
    feed: Feed[int] = Feed(limit=10)
    with feed.subscribe() as one, feed.subscribe() as other:
        for item in range(3):
            feed.publish(item)
        assert [await one.get() for _ in range(3)] == [0, 1, 2]
        assert [await other.get() for _ in range(3)] == [0, 1, 2]


async def test_a_slow_listener_loses_the_oldest_and_slows_nobody():
    feed: Feed[int] = Feed(limit=2)
    with feed.subscribe() as slow:
        for item in range(1000):
            feed.publish(item)
        assert [await slow.get(), await slow.get()] == [998, 999]


async def test_get_waits_for_news():
    feed: Feed[str] = Feed(limit=1)
    with feed.subscribe() as listener:
        waiting = asyncio.create_task(listener.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        feed.publish("news")
        assert await waiting == "news"


async def test_nobody_hears_after_leaving():
    feed: Feed[int] = Feed(limit=1)
    with feed.subscribe():
        assert feed.listeners == 1
    feed.publish(1)
    assert feed.listeners == 0
