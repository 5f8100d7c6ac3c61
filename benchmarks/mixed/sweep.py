"""How a backend's speed grows with the number of requests that it decodes at once. No router takes part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phaseroute.aio import AsyncClient
from phaseroute.burst import Burst, BurstResult, run_burst
from phaseroute.comparison import Spread, spreads
from phaseroute.prompts import distinct_prompts
from phaseroute.requests import GenerateOptions

PROMPT_TOKENS = 24
NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SweepRow:
    """So many equal requests at once, over all runs."""

    backend: str
    requests: int
    figures: Mapping[str, Spread]
    """By the names of `phaseroute.comparison.Figures`."""


async def sweep(
    client: AsyncClient, backend: str, counts: Sequence[int], runs: int, tell: Callable[[str], None]
) -> tuple[SweepRow, ...]:
    """One row for each count. The prompt is short and warm, so what is measured is decoding. Every other run goes from
    the last count to the first. `client`: of the backend itself, which runs as many requests at once as the largest
    count. Raises `PhaserouteError`."""
    prompt = (await distinct_prompts(client, PROMPT_TOKENS)).next()
    options = GenerateOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    await client.complete(prompt, max_new_tokens=1)
    results: dict[int, list[BurstResult]] = {count: [] for count in counts}
    for run in range(runs):
        for count in counts if run % 2 == 0 else counts[::-1]:
            tell(f"run {run + 1} of {runs}, {backend} alone: requests at once: {count}")
            results[count].append(await run_burst(client, Burst((prompt,) * count, 0.0, options), lambda *_: None))
    return tuple(SweepRow(backend, count, spreads(mine)) for count, mine in results.items())
