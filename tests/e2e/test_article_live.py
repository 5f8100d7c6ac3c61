"""The article's burst of 8 over real gRPC: simulated engines that take as long as the published ones, in real time."""

from __future__ import annotations

import asyncio

import pytest

from simulator import article
from simulator.prompts import prefix_tokens
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


@pytest.mark.parametrize(("policy", "to_cpu"), [("two_phase", {1}), ("predictive", {1, 2, 3})])
async def test_the_cpu_gets_its_part_of_eight(policy, to_cpu):
    planned = article.burst(8).requests
    async with stack({name: settings(name) for name in ("cpu", "gpu")}, policy=policy) as router:
        warm = list(prefix_tokens(0, article.PREFIX_TOKENS))
        for backend in router.backends.values():
            await backend.generate(warm, max_new_tokens=1, ignore_eos=True)

        async def one(index: int):
            await asyncio.sleep(planned[index].at_s)  # the workload's own pace
            prompt = [*warm, index, *range(article.PROMPT_TOKENS - article.PREFIX_TOKENS - 1)]
            wire = request(prompt, max_new_tokens=article.NEW_TOKENS, ignore_eos=True)
            return await collect(router.stub.Generate(wire))

        answers = await asyncio.gather(*(one(index) for index in range(8)))
    assert [answer.finished.routing.backend for answer in answers].count("cpu") in to_cpu
    assert all(answer.finished.usage.cached_tokens == article.PREFIX_TOKENS for answer in answers)
    assert all(answer.finished.usage.generated_tokens == article.NEW_TOKENS for answer in answers)
