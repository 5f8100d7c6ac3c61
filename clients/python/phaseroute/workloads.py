"""Bursts that ask different things of a backend: a warm prefix, prefill, decode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from phaseroute.aio import AsyncClient
from phaseroute.burst import Burst
from phaseroute.prompts import Prompts, distinct_prompts, shared_prefix_prompts
from phaseroute.requests import GenerateOptions

ARRIVAL_GAP_S = 0.05


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens. The defaults are those of a published experiment with a warm prefix. The other two workloads
    pair one of the two lengths with a short one."""

    prompt_tokens: int = 516
    new_tokens: int = 128

    @property
    def short_prompt_tokens(self) -> int:
        """Of a prompt that costs next to nothing."""
        return max(16, self.prompt_tokens // 20)

    @property
    def short_answer_tokens(self) -> int:
        """Of an answer that costs next to nothing."""
        return max(1, self.new_tokens // 16)


@dataclass(frozen=True, slots=True)
class Workload:
    """A burst that can be sent again and again, with new prompts each time."""

    name: str
    description: str
    """For people: sizes and what is warm."""
    requests: int
    prompts: Prompts
    """Never gives the same one twice."""
    warm: bool
    """Every backend answers two of the prompts before each burst, so that it has whatever they share."""
    gap_s: float
    """Between two arrivals."""
    options: GenerateOptions
    """The same for all requests; the policy is not among them."""

    def burst(self, policy: str) -> Burst:
        """The next burst, routed by `policy`."""
        options = GenerateOptions(**{**self.options, "policy": policy})
        return Burst(tuple(self.prompts.next() for _ in range(self.requests)), self.gap_s, options)


async def warm_burst(client: AsyncClient, requests: int, sizes: Sizes) -> Workload:
    """Prompts that differ only at the end, their beginning warm on every backend. Raises `PhaserouteError`."""
    return Workload(
        "warm",
        f"{sizes.prompt_tokens}-token prompts, all but about 20 shared and warm on every backend, "
        f"{sizes.new_tokens} new tokens",
        requests,
        await shared_prefix_prompts(client, sizes.prompt_tokens),
        warm=True,
        gap_s=ARRIVAL_GAP_S,
        options=_exactly(sizes.new_tokens, "warm"),
    )


async def cold_prompts(client: AsyncClient, requests: int, sizes: Sizes) -> Workload:
    """Long prompts that no backend has seen, short answers: what prefill costs. Raises `PhaserouteError`."""
    return Workload(
        "cold",
        f"{sizes.prompt_tokens}-token prompts that differ from their first token on and were never seen before, "
        f"{sizes.short_answer_tokens} new tokens",
        requests,
        await distinct_prompts(client, sizes.prompt_tokens),
        warm=False,
        gap_s=ARRIVAL_GAP_S,
        options=_exactly(sizes.short_answer_tokens, "cold"),
    )


async def long_answers(client: AsyncClient, requests: int, sizes: Sizes) -> Workload:
    """Short prompts, long answers: what decode costs. Raises `PhaserouteError`."""
    return Workload(
        "long",
        f"{sizes.short_prompt_tokens}-token prompts that were never seen before, {sizes.new_tokens} new tokens",
        requests,
        await distinct_prompts(client, sizes.short_prompt_tokens),
        warm=False,
        gap_s=ARRIVAL_GAP_S,
        options=_exactly(sizes.new_tokens, "long"),
    )


WORKLOADS: Mapping[str, Callable[[AsyncClient, int, Sizes], Awaitable[Workload]]] = {
    "warm": warm_burst,
    "cold": cold_prompts,
    "long": long_answers,
}
"""By name: from a client of whoever will serve it, the number of requests, and sizes."""


def _exactly(new_tokens: int, label: str) -> GenerateOptions:
    return GenerateOptions(max_new_tokens=new_tokens, ignore_eos=True, workload=label)
