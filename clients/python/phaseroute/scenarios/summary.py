"""Runs in numbers, simulated or live: what each policy came to, how sure that is, how it compares with the first."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaseroute.scenarios.served import Run, Served

REFUSED = "RESOURCE_EXHAUSTED"
"""The code of a request that was turned away at once."""

COMPARED = ("completion_s", "ttft_mean_s", "ttft_p95_s", "finish_mean_s", "finish_p95_s")
"""Figures of which ratios are made; less is better in each."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One figure over the runs that have it."""

    mean: float
    margin: float | None
    """Half the width of the 95 % confidence interval of the mean: Student's t over the runs' values. None with one run,
    which says nothing of the spread."""
    runs: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the confidence interval."""
        return None if self.margin is None else (self.mean - self.margin, self.mean + self.margin)


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend's part under a policy."""

    requests: Estimate
    """Those that ran there, answered or not, by run."""
    figures: Mapping[str, Estimate]
    """As in `PolicyRow`, of the answers from there."""


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A scenario under a policy, over all runs."""

    scenario: str
    policy: str
    requests: int
    """In one run; the most, where one was cut off."""
    runs: int
    figures: Mapping[str, Estimate]
    """By name, without those that no run has. Of answered requests: `completion_s` (first arrival to the end of the
    last answer), `ttft_mean_s`, `ttft_p50_s`, `ttft_p95_s`, `finish_mean_s`, `finish_p50_s`, `finish_p95_s` (both from
    the arrival), `inter_token_p50_s`, `inter_token_p95_s` (over all gaps of all answers), `goodput_tokens_per_s` (new
    tokens of answers that came in full, over completion_s), `finish_mape` and `finish_bias` (mean of |e| and of e,
    where e = (predicted - actual) / actual time to finish, predicted when the request was routed). Of all requests:
    `refused_share` (turned away at once) and `failed_share` (any other end but an answer). The 95th percentiles are by
    nearest rank: with 8 requests, the worst."""
    backends: Mapping[str, BackendRow]
    """By name, those that got any."""
    codes: Mapping[str, int]
    """How the requests of all runs ended: "OK" and other gRPC status codes."""
    ratios: Mapping[str, Estimate]
    """The figures of `COMPARED`, each over that of the same run under the scenario's first policy. Runs are paired,
    since those of equal number have equal arrivals."""


def summarize(runs: Sequence[Run]) -> tuple[PolicyRow, ...]:
    """One row for each scenario and policy, in the order in which they first came."""
    groups: dict[tuple[str, str], list[Run]] = {}
    first: dict[str, str] = {}
    for run in runs:
        groups.setdefault((run.scenario, run.policy), []).append(run)
        first.setdefault(run.scenario, run.policy)
    figures = {key: {run.run: _run_figures(run) for run in group} for key, group in groups.items()}
    return tuple(
        _row(group, figures[scenario, policy], figures[scenario, first[scenario]])
        for (scenario, policy), group in groups.items()
    )


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and confidence interval of at least one value."""
    count = len(values)
    margin = None
    if count > 1:
        margin = t_quantile_975(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(statistics.fmean(values), margin, count)


def as_json(rows: Sequence[PolicyRow]) -> list[dict[str, Any]]:
    """Rows as JSON has them; an estimate is {"mean", "ci95": [low, high] or null, "runs"}."""
    return [
        {
            "scenario": row.scenario,
            "policy": row.policy,
            "requests": row.requests,
            "runs": row.runs,
            "codes": dict(row.codes),
            "figures": _estimates(row.figures),
            "ratios": _estimates(row.ratios),
            "backends": {
                name: {"requests": _estimate_json(each.requests), "figures": _estimates(each.figures)}
                for name, each in row.backends.items()
            },
        }
        for row in rows
    ]


def t_quantile_975(freedom: int) -> float:
    """97.5 % quantile of Student's t with so many degrees of freedom, 1 or more: two-sided 95 %."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    # Fisher's expansion about the normal quantile, two terms: right to four digits from here on.
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


_T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


def _row(
    runs: Sequence[Run], figures: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]]
) -> PolicyRow:
    codes = Counter(item.code for run in runs for item in run.served)
    parts = [_by_backend(run) for run in runs]
    names = sorted({name for part in parts for name in part})
    return PolicyRow(
        scenario=runs[0].scenario,
        policy=runs[0].policy,
        requests=max(len(run.served) for run in runs),
        runs=len(runs),
        figures=_over_runs(list(figures.values())),
        backends={name: _backend_row([part.get(name, []) for part in parts]) for name in names},
        codes=dict(codes.most_common()),
        ratios=_over_runs([_ratios(mine, base[run]) for run, mine in figures.items() if run in base]),
    )


def _by_backend(run: Run) -> dict[str, list[Served]]:
    parts: dict[str, list[Served]] = {}
    for item in run.served:
        if item.backend:
            parts.setdefault(item.backend, []).append(item)
    return parts


def _backend_row(parts: Sequence[Sequence[Served]]) -> BackendRow:
    """From what one backend had in each run."""
    return BackendRow(
        requests=estimate([len(part) for part in parts]), figures=_over_runs([_answer_figures(part) for part in parts])
    )


def _over_runs(figures: Sequence[Mapping[str, float]]) -> dict[str, Estimate]:
    names = dict.fromkeys(name for each in figures for name in each)
    return {name: estimate([each[name] for each in figures if name in each]) for name in names}


def _ratios(mine: Mapping[str, float], base: Mapping[str, float]) -> dict[str, float]:
    return {name: mine[name] / base[name] for name in COMPARED if name in mine and base.get(name, 0.0) > 0}


def _run_figures(run: Run) -> dict[str, float]:
    figures = _answer_figures(run.served)
    tokens = sum(item.new_tokens for item in run.served if item.ok)
    completion_s = run.completion_s
    if completion_s > 0:
        figures["completion_s"] = completion_s
        figures["goodput_tokens_per_s"] = tokens / completion_s
    if run.served:
        refused = sum(item.code == REFUSED for item in run.served)
        failed = sum(not item.ok for item in run.served) - refused
        figures["refused_share"] = refused / len(run.served)
        figures["failed_share"] = failed / len(run.served)
    return figures


def _answer_figures(served: Sequence[Served]) -> dict[str, float]:
    """Of those that were answered."""
    answers = [item for item in served if item.ok]
    figures: dict[str, float] = {}
    for name, values in (("ttft", [item.ttft_s for item in answers]), ("finish", [item.finish_s for item in answers])):
        if values:
            figures[f"{name}_mean_s"] = statistics.fmean(values)
            figures[f"{name}_p50_s"] = statistics.median(values)
            figures[f"{name}_p95_s"] = _nearest_rank(np.array(values), 0.95)
    gaps_s = np.fromiter(itertools.chain.from_iterable(item.gaps_s for item in answers), dtype=float)
    if gaps_s.size:
        figures["inter_token_p50_s"] = float(np.median(gaps_s))
        figures["inter_token_p95_s"] = _nearest_rank(gaps_s, 0.95)
    errors = [error for item in answers if (error := item.finish_error) is not None]
    if errors:
        figures["finish_mape"] = statistics.fmean(map(abs, errors))
        figures["finish_bias"] = statistics.fmean(errors)
    return figures


def _nearest_rank(values: np.ndarray[Any, Any], share: float) -> float:
    return float(np.quantile(values, share, method="inverted_cdf"))


def _estimates(figures: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: _estimate_json(each) for name, each in figures.items()}


def _estimate_json(value: Estimate) -> dict[str, Any]:
    return {"mean": value.mean, "ci95": value.interval, "runs": value.runs}
