"""From answers to figures, and from two sides' figures to ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from benchmarks.side_by_side.answer import Answer, Played

MEMORY = "memory"
RESIDENT = "resident MiB"


class Ratio(Enum):
    """How a figure of the two sides becomes one number."""

    PEER_BY_OURS = "peer / ours"
    OURS_BY_PEER = "ours / peer"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result."""

    workload: str
    name: str
    ratio: Ratio
    headline: str = ""
    """The ratio's name in the last line's JSON object, where it is one of the headlines."""


def _burst(workload: str, headline: str, ttft_headline: str = "") -> tuple[Figure, ...]:
    return (
        Figure(workload, "burst s", Ratio.PEER_BY_OURS, headline),
        Figure(workload, "tokens/s", Ratio.OURS_BY_PEER),
        Figure(workload, "TTFT p50 s", Ratio.PEER_BY_OURS),
        Figure(workload, "TTFT p95 s", Ratio.PEER_BY_OURS, ttft_headline),
        Figure(workload, "cached tokens/request", Ratio.NONE),
    )


FIGURES = (
    Figure("single", "answer s", Ratio.PEER_BY_OURS, "single_stream_ratio"),
    Figure("single", "tokens/s", Ratio.OURS_BY_PEER),
    Figure("single", "TTFT s", Ratio.PEER_BY_OURS),
    *_burst("steady", "steady_ratio", "ttft_p95_ratio"),
    *_burst("seen_once", "seen_once_ratio"),
    *_burst("cold", "cold_ratio"),
    Figure("churn", "revisits s", Ratio.PEER_BY_OURS, "churn_ratio"),
    Figure("churn", "share of prompt reused", Ratio.NONE),
    Figure("long", "worst gap beside it s", Ratio.PEER_BY_OURS, "gap_ratio"),
    Figure("long", "TTFT s", Ratio.PEER_BY_OURS),
    Figure(MEMORY, RESIDENT, Ratio.OURS_BY_PEER, "memory_ratio"),
)
"""Every line, in the order shown. Above 1 means that ours is faster, except for memory: there it means that ours takes
more."""


def figures_of(workload: str, played: Played) -> dict[str, float]:
    """A workload's figures by name."""
    answers = played.measured
    if workload == "single":
        return {
            "answer s": span_s(answers),
            "tokens/s": tokens_per_s(answers),
            "TTFT s": answers[0].ttft_s,
        }
    if workload == "churn":
        return {"revisits s": span_s(answers), "share of prompt reused": reused_share(answers)}
    if workload == "long":
        prefill = answers[0]
        return {
            "worst gap beside it s": worst_gap_s(played.beside_arrivals_s, prefill.sent_s, prefill.arrivals_s[0]),
            "TTFT s": prefill.ttft_s,
        }
    ttft_s = [answer.ttft_s for answer in answers]
    return {
        "burst s": span_s(answers),
        "tokens/s": tokens_per_s(answers),
        "TTFT p50 s": percentile(ttft_s, 0.5),
        "TTFT p95 s": percentile(ttft_s, 0.95),
        "cached tokens/request": statistics.mean(answer.usage.cached_tokens for answer in answers),
    }


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed (nearest rank). `share` in (0, 1]."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def span_s(answers: Sequence[Answer]) -> float:
    """From the first request to the last end."""
    return max(answer.ended_s for answer in answers) - min(answer.sent_s for answer in answers)


def tokens_per_s(answers: Sequence[Answer]) -> float:
    """Generated tokens, over the span."""
    return sum(answer.usage.generated_tokens for answer in answers) / span_s(answers)


def reused_share(answers: Iterable[Answer]) -> float:
    """The part of all prompt tokens that was not computed again."""
    usages = [answer.usage for answer in answers]
    return sum(usage.cached_tokens for usage in usages) / sum(usage.prompt_tokens for usage in usages)


def worst_gap_s(streams: Iterable[Sequence[float]], begun_s: float, ended_s: float) -> float:
    """The longest time between two tokens of one stream, of the gaps that were open at some time between the two
    moments; 0 where there is none."""
    gaps = (
        after - before
        for arrivals_s in streams
        for before, after in pairwise(arrivals_s)
        if after > begun_s and before < ended_s
    )
    return max(gaps, default=0.0)


def ratio(figure: Figure, ours: float, peer: float) -> float | None:
    """One number from both sides' figures; None where the figure has none, or one would divide by zero."""
    above, below = (peer, ours) if figure.ratio is Ratio.PEER_BY_OURS else (ours, peer)
    return None if figure.ratio is Ratio.NONE or not below else above / below


Measured = Mapping[str, Mapping[str, float]]
"""One side's figures of one round, by workload and name."""


@dataclass(frozen=True, slots=True)
class Line:
    """A figure over all rounds."""

    figure: Figure
    ours: float
    """Median over the rounds, like `peer`."""
    peer: float
    ratios: tuple[float, ...]
    """Of each round."""

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios) if self.ratios else None


def lines(ours: Sequence[Measured], peer: Sequence[Measured]) -> list[Line]:
    """What was measured, from one entry a round and side; round i of one side is set against round i of the other."""
    result = []
    for figure in FIGURES:
        if figure.workload not in ours[0]:
            continue
        pairs = [
            (left[figure.workload][figure.name], right[figure.workload][figure.name])
            for left, right in zip(ours, peer, strict=True)
        ]
        ratios = (ratio(figure, left, right) for left, right in pairs)
        result.append(
            Line(
                figure,
                statistics.median(left for left, _ in pairs),
                statistics.median(right for _, right in pairs),
                tuple(value for value in ratios if value is not None),
            )
        )
    return result
