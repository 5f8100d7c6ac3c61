"""What was measured, as tables and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from benchmarks.mixed.options import Options
from benchmarks.mixed.run import Outcome
from benchmarks.mixed.sweep import NEW_TOKENS, PROMPT_TOKENS, SweepRow
from phaseroute.burst import RequestResult
from phaseroute.cli import comparison_view
from phaseroute.cli.tables import plain_table
from phaseroute.comparison import Turn, nearest_rank, summarize
from phaseroute.v1 import inference_pb2


def tables_of(outcome: Outcome) -> list[tuple[str, RenderableType]]:
    """Titles and tables, in the order to show them."""
    simulated = outcome.simulated
    shown: list[tuple[str, RenderableType]] = []
    rows = summarize(outcome.turns)
    for workload, requests in dict.fromkeys((row.workload, row.requests) for row in rows):
        mine = [row for row in rows if (row.workload, row.requests) == (workload, requests)]
        title = comparison_view.heading(workload, requests, simulated=simulated)
        shown.append((title, comparison_view.table(mine)))
    if outcome.turns:
        title = "The request at the 95th percentile of the time to first token, by burst"
        shown.append((comparison_view.marked(title, simulated=simulated), _drivers(outcome.turns)))
    for name in dict.fromkeys(row.backend for row in outcome.sweeps):
        title = f"{name} alone, equal requests at once: warm {PROMPT_TOKENS}-token prompt, {NEW_TOKENS} new tokens"
        mine_too = [row for row in outcome.sweeps if row.backend == name]
        shown.append((comparison_view.marked(title, simulated=simulated), _sweep(mine_too)))
    return shown


def summary(options: Options, outcome: Outcome) -> dict[str, Any]:
    """For programs: the last line."""
    rows = [asdict(row) for row in summarize(outcome.turns)]
    for row in rows:
        row.update(row.pop("figures"))
    sweeps = [{"backend": row.backend, "requests": row.requests, **_plain(row.figures)} for row in outcome.sweeps]
    result = {
        "benchmark": "mixed_burst",
        "simulated": outcome.simulated,
        "complete": outcome.complete,
        "machine": machine(),
        "runs": options.runs,
        "sizes": asdict(options.sizes),
        "backends": {
            name: {"flags": options.backends[name], **_described(status)} for name, status in outcome.backends.items()
        },
        "rows": rows,
        "sweep": sweeps,
    }
    return _rounded(result)  # type: ignore[no-any-return]


def every_request(outcome: Outcome) -> list[dict[str, Any]]:
    """All bursts with all their requests; seconds from the moment a request was sent, those in `routing` from its
    arrival at the router."""
    bursts = [
        {
            "workload": turn.workload,
            "policy": turn.policy,
            "run": turn.run,
            "completion_s": turn.result.completion_s,
            "warmed": _plain(turn.warmed),
            "ttft_p95_request": driver(turn) + 1,
            "requests": [_request(number, each) for number, each in enumerate(turn.result.requests, start=1)],
        }
        for turn in outcome.turns
    ]
    return _rounded(bursts)  # type: ignore[no-any-return]


def driver(turn: Turn) -> int:
    """Index of the request whose time to first token is the burst's 95th percentile."""
    ttft_s = [request.ttft_s for request in turn.result.requests]
    return ttft_s.index(nearest_rank(ttft_s, 0.95))


def machine() -> str:
    """For people: processor, cores, system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {platform.platform()}"


def _drivers(turns: Sequence[Turn]) -> RenderableType:
    shown = plain_table(
        "workload", "requests", "policy", "run", "request", "on", "TTFT (s)", "predicted (s)", "queued (s)",
        "prefill (s)", "cached tokens", "of prompt", left=("workload", "policy", "on"),
    )  # fmt: skip
    for turn in turns:
        index = driver(turn)
        request = turn.result.requests[index]
        answer = request.answer
        predicted_s = answer.routing.predicted_ttft_s if answer.routing else None
        shown.add_row(
            turn.workload,
            str(len(turn.result.requests)),
            Text(turn.policy),
            str(turn.run + 1),
            str(index + 1),
            Text(request.backend),
            f"{request.ttft_s:.3f}",
            "-" if predicted_s is None else f"{predicted_s:.3f}",
            f"{answer.timings.queue_s:.3f}",
            f"{answer.timings.prefill_s:.3f}",
            str(answer.usage.cached_tokens),
            str(answer.usage.prompt_tokens),
        )
    return shown


def _sweep(rows: Sequence[SweepRow]) -> RenderableType:
    columns = {
        "tokens/s": ("tokens_per_s", 1),
        "ITL p50 (ms)": ("inter_token_p50_s", 1000),
        "p95 (ms)": ("inter_token_p95_s", 1000),
        "TTFT p50 (s)": ("ttft_p50_s", 1),
        "p95 (s)": ("ttft_p95_s", 1),
        "all done (s)": ("completion_s", 1),
    }
    shown = plain_table("requests", *columns)
    for row in rows:
        cells = (comparison_view.middle(row.figures.get(name), scale=scale) for name, scale in columns.values())
        shown.add_row(str(row.requests), *cells)
    return shown


def _request(number: int, request: RequestResult) -> dict[str, Any]:
    answer = request.answer
    return {
        "request": number,
        "backend": request.backend,
        "sent_s": request.sent_s,
        "ttft_s": request.ttft_s,
        "e2e_s": request.e2e_s,
        "inter_token_mean_s": request.mean_gap_s,
        "inter_token_max_s": request.max_gap_s,
        **asdict(answer.usage),
        **asdict(answer.timings),
        "routing": asdict(answer.routing) if answer.routing else None,
    }


def _described(status: inference_pb2.BackendStatus) -> dict[str, Any]:
    rates = status.isolated_rates if status.HasField("isolated_rates") else None
    return {
        "engine": status.engine.name,
        "device": status.engine.device,
        "simulated": status.engine.simulated,
        "model": status.model.name,
        "precision": status.model.precision,
        "fingerprint": status.model.fingerprint,
        "max_active": status.max_active,
        "kv_tokens": status.kv_cache.capacity_tokens,
        "prefill_tokens_per_s": rates and rates.prefill_tokens_per_s,
        "decode_tokens_per_s": rates and rates.decode_tokens_per_s,
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: asdict(value) for name, value in values.items()}


def _rounded(value: Any) -> Any:
    """Every float in it to four significant digits."""
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {name: _rounded(each) for name, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
        case _:
            return value
