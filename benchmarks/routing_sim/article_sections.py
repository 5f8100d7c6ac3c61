"""The article reproduced, and what the predictive policy makes of its workload. Simulated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from benchmarks.routing_sim.page import Cell, Section, Table, Target
from benchmarks.routing_sim.plays import (
    MANY_SEEDS,
    POLICIES,
    article,
    cut,
    figures,
    over_seeds,
    percent,
    played,
    with_gpu,
)
from phaseroute.scenarios.served import Run
from simulator.article import PROPORTIONAL_CPU, burst, run_burst
from simulator.search import BestSplit, best_split

PUBLISHED_S = {
    (8, "forced:gpu"): 11.47,
    (8, "two_phase"): 10.35,
    (48, "forced:gpu"): 68.43,
    (48, "two_phase"): 60.88,
}
"""Completion time, mean of three runs."""
PUBLISHED_TO_CPU = {(8, "two_phase"): 1, (48, "two_phase"): 6}
PUBLISHED_EIGHTH_S = {"forced:gpu": (5.561, 11.116), "two_phase": (0.339, 3.681)}
"""Time to first token and to the end of the eighth request of eight."""
PUBLISHED_SCORES_S = {7: {"cpu": 3.118, "gpu": 3.027}, 8: {"cpu": 3.118, "gpu": 3.444}}
BURSTS = (8, 48)


@cache
def best(requests: int) -> BestSplit:
    """The best split that a search finds."""
    return best_split(burst(requests), article())


@cache
def article_run(requests: int, policy: str) -> Run:
    """One of the article's bursts."""
    return run_burst(requests, policy).run


@cache
def auto_run(requests: int, policy: str) -> Run:
    """The same with `--max-active auto` on the GPU."""
    return played(burst(requests), policy, with_gpu(max_active_auto=True))


def to_cpu(run: Run) -> int:
    """Requests."""
    return sum(item.backend == "cpu" for item in run.served)


def reproduced() -> Section:
    """The published figures beside the simulated ones."""
    walls = []
    for (requests, policy), published_s in PUBLISHED_S.items():
        run = article_run(requests, policy)
        sent = PUBLISHED_TO_CPU.get((requests, policy), 0)
        difference = cut(run.completion_s, published_s)
        walls.append((requests, policy, published_s, run.completion_s, difference, sent, to_cpu(run)))
    eighth = []
    for policy, (ttft_s, end_s) in PUBLISHED_EIGHTH_S.items():
        last = article_run(8, policy).served[7]
        eighth.append((policy, last.backend, ttft_s, last.ttft_s, end_s, last.finish_s))
    scores = []
    for request, published in PUBLISHED_SCORES_S.items():
        decision = run_burst(8, "two_phase").decisions[request - 1]
        scores += [
            (request, name, published[name], decision.choice.prices[name].score_s, decision.backend)
            for name in ("cpu", "gpu")
        ]
    return Section(
        "article",
        "The article, reproduced",
        "Bursts of 8 and 48 requests 50 ms apart, 516-token prompts of which 496 are warm on both devices, exactly 128 "
        "new tokens, at most 4 active on a device. Published: three runs, on an Apple M2. Simulated: the real "
        "scheduler, cache, ledger and policy code in virtual time, with step times worked out from the published ones "
        "(`simulator/article.py` says how).",
        (
            Table(
                (
                    "requests",
                    "policy",
                    "published s",
                    "simulated s",
                    "difference",
                    "to the CPU, published",
                    "simulated",
                ),
                tuple(walls),
            ),
            Table(
                ("eighth of 8", "on", "TTFT published s", "simulated s", "end to end published s", "simulated s"),
                tuple(eighth),
            ),
            Table(("request", "candidate", "score published", "simulated", "goes to"), tuple(scores)),
        ),
        "The GPU's scores differ by the few tokens that it had decoded by then; from the printed table's numbers the "
        "policy gives the printed scores to the last digit (`tests/unit/router/test_policies.py`).",
    )


def predicted() -> Section:
    """Predictive on the same bursts."""
    rows: list[tuple[Cell, ...]] = []
    for requests in BURSTS:
        forced = article_run(requests, "forced:gpu")
        for label, run in (
            ("forced:gpu", forced),
            ("two_phase", article_run(requests, "two_phase")),
            ("predictive", article_run(requests, "predictive")),
            ("predictive_own", article_run(requests, "predictive_own")),
            ("forced:gpu, --max-active auto", auto_run(requests, "forced:gpu")),
            ("predictive, --max-active auto", auto_run(requests, "predictive")),
        ):
            found = figures([run])
            rows.append(
                (
                    requests,
                    label,
                    run.completion_s,
                    cut(run.completion_s, forced.completion_s),
                    found.ttft_p50_s,
                    found.ttft_p95_s,
                    found.finish_mean_s,
                    to_cpu(run),
                )
            )
        split = best(requests)
        how = "every split" if split.exhaustive else f"{split.plays} plays"
        rows.append(
            (
                requests,
                f"best split found ({how})",
                split.completion_s,
                cut(split.completion_s, forced.completion_s),
                None,
                None,
                None,
                split.assignment.count("cpu"),
            )
        )
    careful = {**article(), "cpu": PROPORTIONAL_CPU}
    other = [
        (requests, policy, run.completion_s, cut(run.completion_s, article_run(requests, "forced:gpu").completion_s))
        for requests in BURSTS
        for policy in ("two_phase", "predictive")
        for run in [played(burst(requests), policy, careful)]
    ]
    return Section(
        "predictive",
        "The same bursts, predictive",
        "`predictive` plays each device's schedule forward with the request and without it; `predictive_own` looks at "
        "the request's own finish only. With `--max-active auto` the GPU's backend picks its batch size itself: 1, "
        "since 4 rows take 12.8 times as long as one. The best split is what a router could do that knows all arrivals "
        "beforehand.",
        (
            Table(
                (
                    "requests",
                    "policy",
                    "completion s",
                    "against forced",
                    "TTFT p50 s",
                    "p95 s",
                    "end to end mean s",
                    "to the CPU",
                ),
                tuple(rows),
            ),
            Table(
                ("requests", "policy", "completion s if the CPU gains nothing from a batch", "against forced"),
                tuple(other),
            ),
        ),
        "The second table is the careful assumption about what the article does not tell, how a CPU step grows with "
        "its batch. Everywhere else a further row takes what a token of a prompt does.",
    )


def targets() -> Iterator[Target]:
    """Those on the article's workload."""
    for (requests, policy), published_s in PUBLISHED_S.items():
        run = article_run(requests, policy)
        off = run.completion_s / published_s - 1
        yield Target(f"{requests} requests, {policy}: wall time", "within 5 %", f"{100 * off:+.1f} %", abs(off) <= 0.05)
    for (requests, policy), sent in PUBLISHED_TO_CPU.items():
        got = to_cpu(article_run(requests, policy))
        yield Target(f"{requests} requests, {policy}: to the CPU", str(sent), str(got), got == sent)
    for requests, least in ((8, 0.20), (48, 0.32)):
        forced_s = article_run(requests, "forced:gpu").completion_s
        run = article_run(requests, "predictive")
        less = 1 - run.completion_s / forced_s
        yield Target(
            f"{requests} requests: predictive less than forced", f">= {percent(least)}", percent(less), less >= least
        )
        over = run.completion_s / best(requests).completion_s - 1
        yield Target(f"{requests} requests: above the best split", "<= 3 %", f"{100 * over:.1f} %", over <= 0.03)
    forced_s = article_run(48, "forced:gpu").completion_s
    less = 1 - auto_run(48, "predictive").completion_s / forced_s
    yield Target("48 requests, --max-active auto: less than forced", ">= 65 %", percent(less), less >= 0.65)
    worst = max(
        (over_seeds(name, "predictive").ttft_p95_s / over_seeds(name, "forced:gpu").ttft_p95_s, name)
        for name in ("article8", "article48", "poisson", "gamma", "onoff", "prefixes", "cold", "long", "shorter")
    )
    yield Target(
        "p95 TTFT of predictive / forced, worst of 9 scenarios", "<= 1", f"{worst[0]:.2f} ({worst[1]})", worst[0] <= 1.0
    )
    poisson = {policy: over_seeds("poisson", policy, seeds=MANY_SEEDS).ttft_p95_s for policy in POLICIES}
    for base, most in (("forced:gpu", 0.25), ("two_phase", 0.4)):
        ratio = poisson["predictive"] / poisson[base]
        what = f"Poisson, 1 a second, {len(MANY_SEEDS)} seeds: p95 TTFT / {base}"
        yield Target(what, f"<= {most}", f"{ratio:.3f}", ratio <= most)
    gamma = {policy: over_seeds("gamma", policy, seeds=MANY_SEEDS).ttft_p95_s for policy in POLICIES}
    ratio = gamma["predictive"] / gamma["forced:gpu"]
    yield Target(f"gamma, CV 4, {len(MANY_SEEDS)} seeds: p95 TTFT / forced", "<= 0.5", f"{ratio:.3f}", ratio <= 0.5)
