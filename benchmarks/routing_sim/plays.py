"""Scenarios played over and over, and the figures that the tables show. Simulated."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from phaseroute.comparison import nearest_rank
from phaseroute.scenarios.planned import Scenario
from phaseroute.scenarios.presets import ScenarioOptions, build
from phaseroute.scenarios.served import Run, Served
from simulator.devices import fleet
from simulator.play import PlayOptions, play
from simulator.profiles import Profile

SEEDS = range(5)
MANY_SEEDS = range(60)
"""For figures that five seeds give only to a fifth."""
POLICIES = ("forced:gpu", "two_phase", "predictive")


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the seeds."""

    completion_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    finish_mean_s: float
    mape: float | None
    """Mean of |predicted - actual| / actual finish; None without predictions."""
    shares: Mapping[str, float]
    """Of the requests, by backend."""


@cache
def article() -> Mapping[str, Profile]:
    """The article's pair."""
    return fleet("article")


def with_gpu(**changes: object) -> dict[str, Profile]:
    """The article's pair with another GPU."""
    pair = dict(article())
    return {**pair, "gpu": replace(pair["gpu"], **changes)}  # type: ignore[arg-type]


def played(
    scenario: str | Scenario,
    policy: str,
    backends: Mapping[str, Profile] | None = None,
    *,
    options: ScenarioOptions | None = None,
    seed: int = 0,
    lengths: str = "history",
) -> Run:
    """One play."""
    made = build(scenario, options=options, seed=seed) if isinstance(scenario, str) else scenario
    how = PlayOptions(policy=policy, lengths=lengths, seed=seed, keep_gaps=True, learn=False)
    return play(made, backends or article(), how).run


def figures(runs: Sequence[Run]) -> Figures:
    """Of plays that differ by seed."""
    answered = [[item for item in run.served if item.ok] for run in runs]
    errors = [abs(error) for served in answered for item in served if (error := item.finish_error) is not None]
    everybody = [item for served in answered for item in served]
    names = runs[0].backends
    return Figures(
        completion_s=statistics.mean(run.completion_s for run in runs),
        ttft_p50_s=statistics.mean(statistics.median(ttfts_s(served)) for served in answered),
        ttft_p95_s=statistics.mean(nearest_rank(ttfts_s(served), 0.95) for served in answered),
        finish_mean_s=statistics.mean(statistics.mean(item.finish_s for item in served) for served in answered),
        mape=statistics.mean(errors) if errors else None,
        shares={name: sum(item.backend == name for item in everybody) / len(everybody) for name in names},
    )


def over_seeds(
    scenario: str,
    policy: str,
    backends: Mapping[str, Profile] | None = None,
    *,
    options: ScenarioOptions | None = None,
    lengths: str = "history",
    seeds: Sequence[int] = SEEDS,
) -> Figures:
    """The same scenario, drawn anew for each seed."""
    return figures([played(scenario, policy, backends, options=options, seed=seed, lengths=lengths) for seed in seeds])


def ttfts_s(served: Sequence[Served]) -> list[float]:
    """Times to first token."""
    return [item.ttft_s for item in served]


def percent(share: float) -> str:
    """Rounded."""
    return f"{100 * share:.0f} %"


def cut(value: float, base: float) -> str:
    """How much less it is."""
    return f"{100 * (value / base - 1):+.0f} %"
