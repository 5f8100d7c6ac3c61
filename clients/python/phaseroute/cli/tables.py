"""Tables of decisions and backends, for a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from phaseroute.results import Routing
from phaseroute.v1 import inference_pb2, router_pb2

_PROBE_NOTES = {
    router_pb2.PROBE_OUTCOME_LATE: "did not say in time what it has of the prompt; nothing is counted",
    router_pb2.PROBE_OUTCOME_FAILED: "failed to say what it has of the prompt; nothing is counted",
    router_pb2.PROBE_OUTCOME_SKIPPED: "was not asked what it has of the prompt: even all of it could not have won",
}
_STATE_STYLES = {
    router_pb2.BACKEND_STATE_SERVING: "green",
    router_pb2.BACKEND_STATE_DRAINING: "yellow",
    router_pb2.BACKEND_STATE_CONNECTING: "yellow",
    router_pb2.BACKEND_STATE_UNREACHABLE: "red",
}


def plain_table(*columns: str, left: Sequence[str] = ()) -> Table:
    """A light table; columns hold numbers, to the right, unless named in `left`."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    for column in columns:
        # Headings wrap between words, never within one.
        longest = max(map(len, column.split()), default=0)
        justify: JustifyMethod = "left" if column in left else "right"
        table.add_column(column, justify=justify, min_width=longest, overflow="fold")
    return table


def candidate_table(*, labelled: bool) -> Table:
    """Empty table for `add_candidates`: what the policy compared; `labelled` for several decisions in one table."""
    return plain_table(
        *(["#"] if labelled else []),
        "backend",
        "active +queued",
        "prefill to do",
        "decode budget",
        "prefix there",
        "finish (s)",
        "score (s)",
        "chosen",
        left=("backend", "chosen"),
    )


def add_candidates(table: Table, decision: router_pb2.Decision, label: str | None = None) -> None:
    """One row for each candidate of a decision, `label` on the first."""
    for index, candidate in enumerate(decision.candidates):
        labels = [] if label is None else [label if index == 0 else ""]
        chosen = candidate.backend == decision.selected
        style = "dim" if candidate.excluded else "bold green" if chosen else ""
        table.add_row(*labels, Text(candidate.backend), *_candidate_cells(candidate, chosen), style=style)


def _candidate_cells(candidate: router_pb2.Candidate, chosen: bool) -> list[str]:
    if candidate.excluded:
        return [*["-"] * 6, "out"]
    return [
        f"{candidate.active} +{candidate.queued}",
        ("~" if candidate.prompt_tokens_estimated else "") + str(candidate.prefill_tokens),
        str(candidate.decode_tokens),
        "-" if candidate.probe in _PROBE_NOTES else str(candidate.reusable_tokens),
        f"{candidate.predicted_finish_s:.3f}" if candidate.HasField("predicted_finish_s") else "-",
        f"{candidate.score_s:.3f}" if candidate.HasField("score_s") else "-",
        "yes" if chosen else "late" if candidate.unfit else "",
    ]


def decision_table(decision: router_pb2.Decision) -> Table:
    """One decision on its own."""
    table = candidate_table(labelled=False)
    add_candidates(table, decision)
    return table


def decision_text(decision: router_pb2.Decision) -> str:
    """What the table does not say, a line each."""
    attempt = f", attempt {decision.attempt}" if decision.attempt > 1 else ""
    spent_ms = (decision.probe_s + decision.choose_s) * 1e3
    lines = [f"{decision.policy}{attempt}: {decision.reason or 'no reason given'} (decided in {spent_ms:.1f} ms)"]
    for candidate in decision.candidates:
        if candidate.excluded:
            lines.append(f"{candidate.backend} is excluded: {candidate.excluded}")
        elif candidate.probe in _PROBE_NOTES:
            lines.append(f"{candidate.backend} {_PROBE_NOTES[candidate.probe]}")
        if candidate.unfit:
            lines.append(f"{candidate.backend} is left out: {candidate.unfit}")
    precisions = {each.backend: each.precision for each in decision.candidates if not each.excluded}
    if len(set(precisions.values())) > 1:
        lines.append(f"weights are held differently: {_precisions(precisions)}")
    return "\n".join(lines)


def outcome_table(routing: Routing) -> Table:
    """Forecast against what happened."""
    table = plain_table(
        "since arrival at the router", "predicted (s)", "actual (s)", left=("since arrival at the router",)
    )
    table.add_row("first token", _seconds(routing.predicted_ttft_s), _seconds(routing.actual_ttft_s))
    table.add_row("finished", _seconds(routing.predicted_finish_s), _seconds(routing.actual_finish_s))
    return table


def backend_table(entries: Sequence[router_pb2.BackendEntry]) -> Table:
    """A router's fleet."""
    table = plain_table(
        "backend", "engine and model", "requests", "KV tokens", "tokens/s alone", left=("backend", "engine and model")
    )
    for entry in entries:
        name = Text(entry.name, style="bold")
        name.append(f" {state_name(entry.state)}", style=f"not bold {_STATE_STYLES.get(entry.state, '')}")
        name.append(f"\n{entry.target}", style="not bold dim")
        cells = _status_cells(entry.status) if entry.HasField("status") else ["-"] * 4
        table.add_row(name, *cells, end_section=True)
    return table


def backend_text(entries: Sequence[router_pb2.BackendEntry]) -> str:
    """Why some get no work, and what differs between backends of one model, a line each."""
    lines = [f"{entry.name} {state_name(entry.state)}: {entry.detail}" for entry in entries if entry.detail]
    lines += [f"{entry.name} is left out: {entry.left_out}" for entry in entries if entry.left_out]
    by_model: dict[str, dict[str, str]] = {}
    for entry in entries:
        if entry.HasField("status") and not entry.left_out:
            by_model.setdefault(entry.status.model.name, {})[entry.name] = entry.status.model.precision
    for model, precisions in by_model.items():
        if len(set(precisions.values())) > 1:
            lines.append(
                f"{model} is held differently: {_precisions(precisions)}; requests go to any of them unless they "
                "demand a precision"
            )
    return "\n".join(lines)


def state_name(state: int) -> str:
    """`serving` for BACKEND_STATE_SERVING."""
    known = router_pb2.BackendState.DESCRIPTOR.values_by_number.get(state)
    return known.name.removeprefix("BACKEND_STATE_").lower() if known else f"unknown ({state})"


def _status_cells(status: inference_pb2.BackendStatus) -> list[Text]:
    queued = sum(request.phase == inference_pb2.REQUEST_PHASE_QUEUED for request in status.requests)
    engine = Text(status.engine.name, style="yellow" if status.engine.simulated else "")
    if not status.engine.simulated:
        precision = f", {status.model.precision}" if status.model.precision else ""
        engine.append(f"\n{status.engine.device}\n{status.model.name}{precision}", style="dim")
    rates = Text("-")
    if status.HasField("isolated_rates"):
        alone = status.isolated_rates
        rates = Text(f"{alone.prefill_tokens_per_s:.0f} prefill\n{alone.decode_tokens_per_s:.0f} decode ")
    return [
        engine,
        Text(f"{len(status.requests) - queued} of {status.max_active} active\n{queued} queued"),
        Text(f"{status.kv_cache.used_tokens}\nof {status.kv_cache.capacity_tokens}"),
        rates,
    ]


def _precisions(by_backend: Mapping[str, str]) -> str:
    return ", ".join(f"{name} in {precision or 'unknown precision'}" for name, precision in by_backend.items())


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
