"""How fast the simulator plays a wide fleet: seconds of one core for many requests over many backends.

    python -m benchmarks.simulator_speed [--backends 1000] [--requests 100000] [--policy two_phase] [--sample 8]

The fleet is half GPU-like, half CPU-like machines at about 0.6 of what they can do. Prompts have 200-600 tokens, of
which most begin with one of 200 shared prefixes of 150; answers have 16-128. What is played is SIMULATED; the time that
it takes is not. `--cprofile` shows where it goes. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import resource
import sys
import time
from collections import Counter

from backend_service.engines.simulated import ModelSpeed
from backend_service.step_model import IsolatedRates
from phaseroute.scenarios.planned import Planned, Scenario
from service_kit.step_time import StepModel
from simulator.play import PlayOptions, play
from simulator.profiles import Profile

KINDS = {
    "gpu": Profile(ModelSpeed(StepModel(8e-3, 9e-5, 8e-4, 2e-8, 512, 0.0), IsolatedRates(10_000, 110)), max_active=8),
    "cpu": Profile(ModelSpeed(StepModel(2e-3, 2e-3, 6e-3, 4e-7, 512, 0.0), IsolatedRates(450, 98)), max_active=4),
}
RATE_PER_BACKEND = 1.3
"""Arrivals a second, over the number of backends."""
PREFIXES, PREFIX_TOKENS = 200, 150


def fleet(backends: int) -> dict[str, Profile]:
    """Of each kind every other one."""
    kinds = list(KINDS)
    return {f"{kinds[place % 2]}-{place // 2}": KINDS[kinds[place % 2]] for place in range(backends)}


def scenario(requests: int, rate_per_s: float, rng: random.Random) -> Scenario:
    """Poisson arrivals."""
    at_s, planned = 0.0, []
    for _ in range(requests):
        at_s += rng.expovariate(rate_per_s)
        answer = rng.randint(16, 128)
        planned.append(
            Planned(
                at_s=at_s,
                prompt_tokens=rng.randint(200, 600),
                prefix=rng.randrange(PREFIXES) if rng.random() < 0.8 else -1,
                prefix_tokens=PREFIX_TOKENS,
                max_new_tokens=128,
                new_tokens=answer,
            )
        )
    return Scenario(name="wide", description=f"{requests} requests at {rate_per_s:g} a second", requests=tuple(planned))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--policy", default="two_phase")
    parser.add_argument("--sample", type=int, help="backends that the router looks at, drawn at random; default: all")
    parser.add_argument("--cprofile", action="store_true")
    args = parser.parse_args()
    profiles = fleet(args.backends)
    wide = scenario(args.requests, RATE_PER_BACKEND * args.backends, random.Random(1))
    options = PlayOptions(policy=args.policy, sample=args.sample, learn=False, progress_interval_s=None)
    profiler = cProfile.Profile()
    begun_s = time.process_time()
    if args.cprofile:
        profiler.enable()
    run = play(wide, profiles, options).run
    profiler.disable()
    seconds = time.process_time() - begun_s
    if args.cprofile:
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(40)
    ttft_s = sorted(item.ttft_s for item in run.served if item.ok)
    print(
        json.dumps(
            {
                "benchmark": "simulator_speed",
                "simulated": True,
                "backends": args.backends,
                "requests": args.requests,
                "policy": args.policy,
                "sample": args.sample,
                "cpu_s": round(seconds, 1),
                "ms_per_request": round(1000 * seconds / args.requests, 3),
                "requests_per_s": round(args.requests / seconds),
                "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
                "virtual_s": round(run.completion_s, 1),
                "codes": dict(Counter(item.code for item in run.served)),
                "simulated_ttft_p50_s": round(ttft_s[len(ttft_s) // 2], 3) if ttft_s else None,
                "simulated_ttft_p95_s": round(ttft_s[len(ttft_s) * 95 // 100], 3) if ttft_s else None,
                "cached_share": round(
                    sum(item.cached_tokens for item in run.served) / sum(item.prompt_tokens for item in run.served), 3
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
