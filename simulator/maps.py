"""Which crossover maps a set of scenarios asks for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low

from phaseroute.scenarios.crossover import CrossoverMap
from phaseroute.scenarios.planned import Scenario
from router_service.lengths import LENGTH_POLICIES
from router_service.policies.registry import make_policy
from simulator.crossover import Asked, after, crossover_map
from simulator.profiles import Profile

MOST_BACKENDS = 8
"""Maps of wider fleets tell nothing: an idle backend is always there."""
ROWS = 25
COLUMNS = 17


def typical(scenario: Scenario) -> Asked:
    """The median request of a scenario, under its commonest label."""
    requests = scenario.requests
    ignoring = sum(planned.new_tokens == planned.max_new_tokens for planned in requests)
    return Asked(
        prompt_tokens=median_low(planned.prompt_tokens for planned in requests),
        max_new_tokens=median_low(planned.max_new_tokens for planned in requests),
        workload=Counter(planned.workload for planned in requests).most_common(1)[0][0],
        ignore_eos=2 * ignoring > len(requests),
    )


def maps_of(
    scenarios: Sequence[Scenario], fleet: Mapping[str, Profile], policies: Sequence[str], lengths: str, seed: int = 0
) -> Iterator[tuple[str, CrossoverMap]]:
    """With a name for a file: a map for each kind of typical request and each policy that prices candidates, with the
    backend that answers it fastest alone as the busy one. Where answers end before their budget, a map for each way to
    estimate their lengths, each having seen the scenario's answers."""
    if not 2 <= len(fleet) <= MOST_BACKENDS:
        return
    seen = set()
    for scenario in scenarios:
        asked = typical(scenario)
        if asked in seen:
            continue
        seen.add(asked)
        busy = fastest(fleet, asked)
        step = max(1, asked.prompt_tokens // (COLUMNS - 1))
        most = max(ROWS - 1, 2 * fleet[busy].max_active)
        for policy in policies:
            made = make_policy(policy, fleet.keys(), random.Random(seed))
            if not (made.forecasts or made.prices_reuse):
                continue
            # Others than forecasts look at budgets only.
            ways = tuple(LENGTH_POLICIES) if made.forecasts and not asked.ignore_eos else (lengths,)
            for way in ways:
                told = made.forecasts and not asked.ignore_eos
                chart = crossover_map(
                    policy,
                    fleet,
                    busy,
                    asked=asked,
                    backlog=range(0, most + 1, max(1, most // (ROWS - 1))),
                    cached_tokens=range(0, asked.prompt_tokens, step),
                    lengths=after(way, scenario.requests),
                    note=f"answers by {way}" if told else "",
                    seed=seed,
                )
                stem = f"{scenario.name.replace(':', '-')}_{policy}{f'_{way}' if told else ''}_crossover"
                yield stem, chart


def fastest(fleet: Mapping[str, Profile], asked: Asked) -> str:
    """The backend that answers this request first when all are idle and cold, by their isolated rates."""

    def alone_s(name: str) -> float:
        rates = fleet[name].speed.rates()
        return asked.prompt_tokens / rates.prefill_tokens_per_s + asked.max_new_tokens / rates.decode_tokens_per_s

    return min(fleet, key=alone_s)
