"""A summary as text by cells, for a terminal or a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phaseroute.scenarios.summary import BackendRow, Estimate, PolicyRow


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in one place of a table."""

    text: str = ""
    detail: str = ""
    """How sure it is, or what else there is to say; shown smaller."""


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a summary."""

    heading: str
    figure: str
    """As `PolicyRow.figures` calls it."""
    scale: float = 1.0
    percent: bool = False
    signed: bool = False
    ratio: bool = False
    """To the first policy's."""
    brief: bool = True
    """It is among those that a terminal has room for."""

    def of(self, row: PolicyRow) -> Cell:
        """The cell of a policy."""
        return self._cell(row.ratios if self.ratio else row.figures)

    def of_backend(self, row: BackendRow) -> Cell:
        """The cell of a backend; empty where a figure is of all together only."""
        return Cell() if self.ratio else self._cell(row.figures)

    def _cell(self, figures: Mapping[str, Estimate]) -> Cell:
        value = figures.get(self.figure)
        if value is None:
            return Cell()
        scale = 100.0 if self.percent else self.scale
        mean = value.mean * scale
        digits = 1 if self.percent else 2 if self.ratio else _digits(mean)
        text = f"{mean:{'+' if self.signed else ''}.{digits}f}"
        if value.margin is None:
            return Cell(text)
        margin = value.margin * scale
        # Without a leading zero and with no more digits than say something, so that it is hardly wider than the mean.
        spread = f"{margin:.{min(digits, _digits(margin))}f}".removeprefix("0")
        return Cell(text, f"±{spread}")


COLUMNS = (
    Column("all done (s)", "completion_s"),
    Column("/ first", "completion_s", ratio=True),
    Column("TTFT mean (s)", "ttft_mean_s", brief=False),
    Column("TTFT p50 (s)", "ttft_p50_s"),
    Column("TTFT p95 (s)", "ttft_p95_s"),
    Column("/ first", "ttft_p95_s", ratio=True, brief=False),
    Column("finish mean (s)", "finish_mean_s", brief=False),
    Column("finish p50 (s)", "finish_p50_s", brief=False),
    Column("finish p95 (s)", "finish_p95_s"),
    Column("ITL p50 (ms)", "inter_token_p50_s", scale=1000.0),
    Column("ITL p95 (ms)", "inter_token_p95_s", scale=1000.0),
    Column("tokens /s", "goodput_tokens_per_s", brief=False),
    Column("MAPE (%)", "finish_mape", percent=True),
    Column("bias (%)", "finish_bias", percent=True, signed=True, brief=False),
    Column("refused (%)", "refused_share", percent=True, brief=False),
    Column("failed (%)", "failed_share", percent=True, brief=False),
)
"""TTFT: time to first token; ITL: inter-token latency; finish: from arrival to the end of the answer. `PolicyRow` says
what each of them is exactly."""

EXPLANATION = (
    "TTFT: time to first token; finish: from arrival to the end of the answer; ITL: inter-token latency; MAPE: mean "
    "error of the finish predicted when a request was routed; / first: over the same run's first policy"
)


def requests(row: PolicyRow) -> Cell:
    """How many there are in a run; and how many of all runs were not answered."""
    lost = sum(count for code, count in row.codes.items() if code != "OK")
    return Cell(f"{row.requests:,}", f"{lost:,} lost" if lost else "")


def backend_requests(row: BackendRow) -> Cell:
    """How many a backend answered, mean over the runs."""
    return Cell(f"{row.requests.mean:,.{0 if row.requests.mean.is_integer() else 1}f}")


def certainty(rows: Sequence[PolicyRow]) -> str:
    """What the ± are, or why there are none."""
    most = max((row.runs for row in rows), default=0)
    if most < 2:
        return "one run: no confidence intervals"
    return f"means over {most} runs; ± 95 % confidence intervals, by Student's t over the runs"


def _digits(value: float) -> int:
    """Three digits that count, below 1,000 and down to a thousandth."""
    size = abs(value)
    return 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
