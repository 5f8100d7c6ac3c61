"""What the article left open, a table each. Simulated."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.routing_sim.page import Cell, Section, Table
from benchmarks.routing_sim.plays import POLICIES, SEEDS, Figures, figures, over_seeds, percent, played, with_gpu
from phaseroute.comparison import nearest_rank
from phaseroute.scenarios.presets import ScenarioOptions, build
from simulator.article import burst
from simulator.crossover import Asked, after, crossover_map
from simulator.devices import fleet

FIVE_SEEDS = f"Means over {len(SEEDS)} seeds."


def concurrency() -> Section:
    """How many requests the GPU should run at once."""
    rows: list[tuple[Cell, ...]] = []
    for most in (1, 2, 3, 4, 6, 8, "auto"):
        gpu = with_gpu(max_active_auto=True) if most == "auto" else with_gpu(max_active=most)
        runs = [played(burst(48), policy, gpu) for policy in POLICIES]
        found = [figures([run]) for run in runs]
        rows.append((str(most), *(each.completion_s for each in found), *(each.ttft_p95_s for each in found)))
    return Section(
        "concurrency",
        "How many at once on the GPU",
        "The burst of 48 with other batch limits on the GPU; beyond 4 rows its step times are extrapolated.",
        (Table(("max active on the GPU", *_by("completion s"), *_by("TTFT p95 s")), tuple(rows)),),
        "An engine that gains nothing from a batch should not have one: one request at a time is done in a fraction of "
        "the time. `auto` finds that from its own step model.",
    )


def sustained() -> Section:
    """Poisson arrivals."""
    rates = (0.25, 0.5, 0.75, 1.0, 1.25)
    return Section(
        "sustained",
        "Sustained arrivals",
        f"The article's requests, 48 at random (Poisson) at so many a second. {FIVE_SEEDS}",
        (_three(("requests/s",), [((rate,), "poisson", ScenarioOptions(rate=rate)) for rate in rates]),),
    )


def bursty() -> Section:
    """Irregular arrivals."""
    cases: list[tuple[tuple[Cell, ...], str, ScenarioOptions | None]] = [
        ((f"gamma, CV {cv:g}",), "gamma", ScenarioOptions(cv=cv)) for cv in (0.5, 1.0, 2.0, 4.0, 8.0)
    ]
    cases.append((("on/off: 4 a second for 5 s, rest for 20 s",), "onoff", None))
    return Section(
        "bursty",
        "Irregular, bursty arrivals",
        f"One request a second on average, 48 of them (on/off: 96). {FIVE_SEEDS}",
        (_three(("arrivals",), cases),),
    )


def hit_rates() -> Section:
    """How much is warm."""
    rates = (0.0, 0.25, 0.5, 0.75, 1.0)
    return Section(
        "hit-rates",
        "Varied hit rates",
        "Prompts of 420 to 620 tokens, of which so many in a hundred begin with one of 20 prefixes of 400 tokens, cold "
        f"at the start; 0.8 a second, 96 requests, 128 new tokens. {FIVE_SEEDS}",
        (
            _three(
                ("share with a known prefix",),
                [((percent(r),), "prefixes", ScenarioOptions(hit_rate=r)) for r in rates],
            ),
        ),
    )


def tail() -> Section:
    """Who drives the 95th percentile of the time to first token."""
    rows: list[tuple[Cell, ...]] = []
    for requests in (8, 48):
        for policy in POLICIES:
            run = played(burst(requests), policy)
            bar_s = nearest_rank([item.ttft_s for item in run.served], 0.95)
            late = [item for item in run.served if item.ttft_s >= bar_s]
            rows.append(
                (
                    requests,
                    policy,
                    bar_s,
                    ", ".join(str(item.index + 1) for item in late),
                    ", ".join(sorted({item.backend for item in late})),
                    max(item.ttft_s for item in run.served if item.backend == "gpu"),
                    max((item.ttft_s for item in run.served if item.backend == "cpu"), default=None),
                )
            )
    return Section(
        "tail",
        "Who drives p95 of the time to first token",
        "The requests whose first token came as late as the 95th percentile or later.",
        (
            Table(
                ("requests", "policy", "TTFT p95 s", "requests", "on", "latest on the GPU s", "on the CPU s"),
                tuple(rows),
            ),
        ),
        "It is the last ones in the GPU's line. two_phase leaves that line as it is for all but one request of eight, "
        "so p95 hardly moves, as the article found; to move it, the line itself has to be shorter.",
    )


def inter_token() -> Section:
    """How fast the slow device streams."""
    rows: list[tuple[Cell, ...]] = []
    for name in ("article8", "article48", "poisson"):
        for policy in POLICIES:
            run = played(name, policy)
            for backend in run.backends:
                gaps_s = [gap for item in run.served if item.backend == backend for gap in item.gaps_s]
                if gaps_s:
                    ms = [
                        1000 * value for value in (statistics.median(gaps_s), nearest_rank(gaps_s, 0.95), max(gaps_s))
                    ]
                    sent = sum(item.backend == backend for item in run.served)
                    rows.append((name, policy, backend, sent, *ms))
    return Section(
        "inter-token",
        "Inter-token latency of the slow device",
        "Over all gaps between two tokens of all requests.",
        (Table(("scenario", "policy", "device", "requests", "p50 ms", "p95 ms", "longest ms"), tuple(rows)),),
        "With full batches the CPU streams half as slowly again as the GPU, not by the factor of six that the rates of "
        "a request alone suggest; the longest gaps are prompts that join a running batch.",
    )


def lengths() -> Section:
    """What estimates of output length do."""
    rows: list[tuple[Cell, ...]] = []
    for name in ("shorter", "longer"):
        forced = over_seeds(name, "forced:gpu")
        two = over_seeds(name, "two_phase")
        rows.append((name, "two_phase (budgets)", *_length_cells(two, forced)))
        for way in ("budget", "ratio", "history"):
            rows.append(
                (name, f"predictive, {way}", *_length_cells(over_seeds(name, "predictive", lengths=way), forced))
            )
    pair = fleet("article")
    crossings: list[tuple[Cell, ...]] = []
    for name in ("shorter", "longer"):
        requests = build(name).requests
        budget = requests[0].max_new_tokens
        asked = Asked(prompt_tokens=516, max_new_tokens=budget, workload="chat", ignore_eos=False)
        for way in ("budget", "ratio", "history"):
            chart = crossover_map(
                "predictive",
                pair,
                "gpu",
                asked=asked,
                backlog=range(0, 41),
                cached_tokens=(0, 496),
                lengths=after(way, requests),
            )
            cpu = chart.backends.index("cpu")
            first = [
                next((rows for rows, row in zip(chart.backlog, chart.choice, strict=True) if row[column] == cpu), None)
                for column in (0, 1)
            ]
            crossings.append((name, budget, way, *("never" if at is None else at for at in first)))
    return Section(
        "lengths",
        "Realised lengths against budgets",
        "`shorter`: answers may have 128 tokens and come to about 40. `longer`: they may have 512; six of seven come "
        f"to about 40, one to 400 or more. The article's prompts, 192 at random. {FIVE_SEEDS} Then, after such "
        "answers, the least number of requests on the GPU from which one more goes to the idle, cold CPU.",
        (
            Table(
                ("scenario", "policy", "end to end mean s", "TTFT p95 s", "against forced", "to the CPU", "MAPE"),
                tuple(rows),
            ),
            Table(
                ("scenario", "budget", "lengths by", "crossover, prompt cold on the GPU", "496 of 516 warm"),
                tuple(crossings),
            ),
        ),
        "Budgets make every line look longer than it is, so requests cross over to the slow device earlier, and "
        "forecasts are off by the ratio of budget to answer. On this pair crossing over early does little harm, and "
        "now and then some good, since it keeps the GPU's batch small: the three differ far more in what they promise "
        "than in what comes of it. docs/output-lengths.md has the estimators.",
    )


def third() -> Section:
    """A device in between."""
    rows: list[tuple[Cell, ...]] = []
    for name in ("article8", "article48", "poisson", "gamma"):
        for label, backends in (("cpu, gpu", fleet("article")), ("cpu, npu, gpu", fleet("article3"))):
            for policy in POLICIES:
                found = over_seeds(name, policy, backends)
                shares = ", ".join(f"{device} {percent(share)}" for device, share in found.shares.items())
                rows.append((name, label, policy, found.completion_s, found.ttft_p95_s, found.finish_mean_s, shares))
    return Section(
        "third",
        "A third device in between",
        "The npu is made up: in every figure the geometric mean of the other two. " + FIVE_SEEDS,
        (
            Table(
                ("scenario", "devices", "policy", "completion s", "TTFT p95 s", "end to end mean s", "went to"),
                tuple(rows),
            ),
        ),
    )


def accuracy() -> Section:
    """How far off the forecasts are."""
    rows: list[tuple[Cell, ...]] = []
    for name in (
        "article8",
        "article48",
        "poisson",
        "gamma",
        "onoff",
        "sustained",
        "prefixes",
        "cold",
        "long",
        "shorter",
    ):
        errors = [over_seeds(name, policy).mape for policy in ("two_phase", "predictive")]
        rows.append((name, *(None if error is None else percent(error) for error in errors)))
    return Section(
        "accuracy",
        "How far off the forecasts are",
        "Mean of |predicted - actual| / actual finish, as predicted when the request was routed. A forecast knows what "
        "is there and reckons with a few requests more; the first requests of a burst cannot know that it is one. "
        + FIVE_SEEDS,
        (Table(("scenario", "two_phase", "predictive"), tuple(rows)),),
    )


SECTIONS = (concurrency, sustained, bursty, hit_rates, tail, inter_token, lengths, third, accuracy)


def _by(what: str) -> list[str]:
    return [f"{what}, {policy}" for policy in POLICIES]


def _three(heads: Sequence[str], cases: Sequence[tuple[tuple[Cell, ...], str, ScenarioOptions | None]]) -> Table:
    """TTFT p95 and mean end to end under three policies, a row a case."""
    rows: list[tuple[Cell, ...]] = []
    for labels, name, options in cases:
        found = [over_seeds(name, policy, options=options) for policy in POLICIES]
        rows.append(
            (
                *labels,
                *(each.ttft_p95_s for each in found),
                *(each.finish_mean_s for each in found),
                percent(found[-1].shares["cpu"]),
            )
        )
    return Table((*heads, *_by("TTFT p95 s"), *_by("end to end mean s"), "predictive: to the CPU"), tuple(rows))


def _length_cells(found: Figures, forced: Figures) -> tuple[Cell, ...]:
    return (
        found.finish_mean_s,
        found.ttft_p95_s,
        f"{100 * (found.finish_mean_s / forced.finish_mean_s - 1):+.0f} %",
        percent(found.shares["cpu"]),
        None if found.mape is None else percent(found.mape),
    )
