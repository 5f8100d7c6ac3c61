"""The article's burst of 8 over real gRPC: simulated engines that take as long as the published ones, in real time."""

from __future__ import annotations

import asyncio

from simulator import article
from tests.e2e.stacks import stack
from tests.integration.backends import collect, request


def settings(name: str) -> dict:
    speed = article.BACKENDS[name].speed
    return {
        "engine": "simulated",
        "kv_tokens": 16_384,
        "step_target_ms": 0,
        "simulated_prefill_rate": speed.prefill_tokens_per_s,
        "simulated_decode_ms": ",".join(f"{size}:{1000 * step_s:g}" for size, step_s in speed.decode_step_s.items()),
        "simulated_decode_rate": speed.reported_decode_tokens_per_s,
    }


async def test_two_phase_sends_one_of_eight_to_the_cpu():
    async with stack({name: settings(name) for name in ("cpu", "gpu")}) as router:
        for backend in router.backends.values():
            await backend.generate(article.prompt(0)[: article.PREFIX_TOKENS], max_new_tokens=1, ignore_eos=True)

        async def one(index: int):
            await asyncio.sleep(index * article.GAP_S)  # the workload's own pace
            wire = request(article.prompt(index), max_new_tokens=article.NEW_TOKENS, ignore_eos=True)
            return await collect(router.stub.Generate(wire))

        answers = await asyncio.gather(*(one(index) for index in range(8)))
    assert [answer.finished.routing.backend for answer in answers].count("cpu") == 1
    assert all(answer.finished.usage.cached_tokens == article.PREFIX_TOKENS for answer in answers)
    assert all(answer.finished.usage.generated_tokens == article.NEW_TOKENS for answer in answers)
