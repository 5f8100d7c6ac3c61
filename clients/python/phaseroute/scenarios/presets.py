"""Scenarios by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from phaseroute.scenarios.arrivals import TRACE_PREFIX, Gamma, Gap, OnOff, Poisson
from phaseroute.scenarios.bounds import BadScenario
from phaseroute.scenarios.lengths import Fixed, Lognormal, Uniform
from phaseroute.scenarios.options import ScenarioOptions, changed, ranged
from phaseroute.scenarios.planned import Scenario
from phaseroute.scenarios.prefixes import Pool, Shared
from phaseroute.scenarios.preset import Preset
from phaseroute.scenarios.trace import read_trace
from phaseroute.scenarios.workloads import Workload

__all__ = ["PRESETS", "BadScenario", "Preset", "ScenarioOptions", "build"]

_ARTICLE = (Workload(prompts=Fixed(516), budgets=Fixed(128)),)
_ARTICLE_PREFIX = Shared(496)

PRESETS: Mapping[str, Preset] = {
    "article8": Preset(
        description="8 requests 50 ms apart, 496 of 516 prompt tokens warm, exactly 128 new",
        requests=8,
        arrivals=Gap(0.05),
        prefixes=_ARTICLE_PREFIX,
        workloads=_ARTICLE,
    ),
    "article48": Preset(
        description="48 requests 50 ms apart, 496 of 516 prompt tokens warm, exactly 128 new",
        requests=48,
        arrivals=Gap(0.05),
        prefixes=_ARTICLE_PREFIX,
        workloads=_ARTICLE,
    ),
    "poisson": Preset(
        description="the article's requests, one a second on average",
        requests=48,
        arrivals=Poisson(1.0),
        prefixes=_ARTICLE_PREFIX,
        workloads=_ARTICLE,
    ),
    "gamma": Preset(
        description="the article's requests, one a second on average, in irregular bursts (CV 4)",
        requests=48,
        arrivals=Gamma(1.0, 4.0),
        prefixes=_ARTICLE_PREFIX,
        workloads=_ARTICLE,
    ),
    "onoff": Preset(
        description="the article's requests, 4 a second for 5 s, then 20 s of rest, and again",
        requests=96,
        arrivals=OnOff(4.0, 5.0, 20.0),
        prefixes=_ARTICLE_PREFIX,
        workloads=_ARTICLE,
    ),
    "sustained": Preset(
        description="the article's requests, 0.8 a second on average for ten minutes",
        requests=480,
        arrivals=Poisson(0.8),
        prefixes=_ARTICLE_PREFIX,
        workloads=_ARTICLE,
    ),
    "prefixes": Preset(
        description="prompts of which 6 in 10 begin with one of 20 prefixes, cold at the start",
        requests=96,
        arrivals=Poisson(0.8),
        prefixes=Pool(20, 400, 0.6),
        workloads=(Workload(prompts=Uniform(420, 620), budgets=Fixed(128)),),
    ),
    "cold": Preset(
        description="long prompts that share nothing, 8 new tokens each",
        requests=8,
        arrivals=Gap(0.05),
        workloads=(Workload(prompts=Fixed(516), budgets=Fixed(8)),),
    ),
    "long": Preset(
        description="short prompts, exactly 256 new tokens each",
        requests=8,
        arrivals=Gap(0.05),
        workloads=(Workload(prompts=Fixed(24), budgets=Fixed(256)),),
    ),
    "shorter": Preset(
        description="the article's prompts; answers may have 128 tokens and come to about 40",
        requests=192,
        arrivals=Poisson(2.5),
        prefixes=_ARTICLE_PREFIX,
        workloads=(Workload(label="chat", prompts=Fixed(516), budgets=Fixed(128), answers=Lognormal(40, 0.6, 127)),),
    ),
    "longer": Preset(
        description="answers may have 512 tokens; six of seven come to about 40, one nearly to all of it",
        requests=192,
        arrivals=Poisson(1.2),
        prefixes=_ARTICLE_PREFIX,
        workloads=(
            Workload(label="chat", weight=6, prompts=Fixed(516), budgets=Fixed(512), answers=Lognormal(40, 0.6, 127)),
            Workload(label="chat", prompts=Fixed(516), budgets=Fixed(512), answers=Uniform(400, 511)),
        ),
    ),
    "wide": Preset(
        description="for a fleet of a thousand: 1,000 requests a second, prefixes from a pool of 200",
        requests=100_000,
        arrivals=Poisson(1000.0),
        prefixes=Pool(200, 150, 0.8),
        workloads=(Workload(prompts=Uniform(200, 600), budgets=Fixed(128), answers=Uniform(16, 127)),),
    ),
}


def build(name: str, *, options: ScenarioOptions | None = None, seed: int = 0) -> Scenario:
    """A scenario of `PRESETS`, or "trace:FILE", with some values in place of its own; the same for the same seed.

    Raises `BadScenario` for an unknown name, for values that cannot be, and for options that do not apply to it; each
    in one line that says what is allowed.
    """
    options = options or ScenarioOptions()
    if name.startswith(TRACE_PREFIX):
        return _recorded(Path(name.removeprefix(TRACE_PREFIX)), options)
    if name not in PRESETS:
        raise BadScenario(f"{name!r} is no scenario; use one of {', '.join(PRESETS)}, {TRACE_PREFIX}FILE")
    return changed(name, PRESETS[name], options).draw(name, seed)


def _recorded(path: Path, options: ScenarioOptions) -> Scenario:
    others = options.given().keys() - {"requests"}
    if others:
        option = min(others)
        raise BadScenario(f"a trace is played as it was recorded, without {option}; change its rows instead", option)
    scenario = read_trace(path)
    if options.requests is None:
        return scenario
    return replace(
        scenario, requests=scenario.requests[: ranged("requests", options.requests, 1, len(scenario.requests))]
    )
