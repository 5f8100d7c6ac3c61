"""Every request of every run as a line of a CSV file."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from phaseroute.scenarios.served import Run, Served

COLUMNS = (
    "scenario",
    "run",
    "policy",
    "index",
    "arrival_s",
    "backend",
    "code",
    "workload",
    "prompt_tokens",
    "cached_tokens",
    "new_tokens",
    "predicted_ttft_s",
    "ttft_s",
    "predicted_finish_s",
    "finish_s",
    "inter_token_p50_s",
    "inter_token_max_s",
    "simulated",
)
"""Seconds from the request's arrival, `arrival_s` from the start of the scenario. A cell is empty where there is
nothing to say: times of a request that was not answered, predictions of a policy that makes none, gaps of one token."""


def write_csv(path: Path, runs: Iterable[Run]) -> None:
    """Write them in order, in one go: a reader never sees half a file. Raises `OSError`."""
    draft = path.with_name(f"{path.name}.part")
    with draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for run in runs:
            writer.writerows(_rows(run))
    draft.replace(path)


def _rows(run: Run) -> Iterator[tuple[object, ...]]:
    for item in run.served:
        times = _times(item) if item.ok else ("",) * 6
        yield (
            run.scenario, run.run, run.policy, item.index, repr(item.arrived_s), item.backend, item.code, item.workload,
            item.prompt_tokens, item.cached_tokens, item.new_tokens, *times, int(run.simulated),
        )  # fmt: skip


def _times(item: Served) -> tuple[str, ...]:
    gaps_s = item.gaps_s
    return tuple(
        "" if value is None else repr(value)
        for value in (
            item.predicted_ttft_s,
            item.ttft_s,
            item.predicted_finish_s,
            item.finish_s,
            statistics.median(gaps_s) if gaps_s else None,
            max(gaps_s, default=None),
        )
    )
