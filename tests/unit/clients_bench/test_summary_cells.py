"""How figures read."""

from __future__ import annotations

import pytest
from rich.console import Console

from phaseroute.cli.scenario_view import table
from phaseroute.scenarios import summary_cells
from phaseroute.scenarios.summary import summarize
from phaseroute.scenarios.summary_cells import COLUMNS, Cell
from tests.unit.clients_bench.runs import lost, run_of, served


def cells(*runs) -> dict[str, Cell]:
    (row, *_) = summarize(runs)
    return {column.heading: column.of(row) for column in COLUMNS if not column.ratio}


def shown(*runs, simulated: bool = False, width: int = 80) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(table(summarize(runs), simulated=simulated))
    return captured.get()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00345, "0.003"), (0.1234, "0.123"), (1.2345, "1.23"), (9.999, "10.0"), (123.4, "123")]
)
def test_three_digits_count(seconds: float, text: str):
    assert cells(run_of(served(0, ttft_s=seconds)))["TTFT p50 (s)"] == Cell(text)


def test_shares_are_percentages_and_a_bias_has_a_sign():
    found = cells(run_of(served(0, finish_s=2.0, predicted_finish_s=1.9), lost(1)))
    assert (found["MAPE (%)"], found["bias (%)"], found["failed (%)"]) == (Cell("5.0"), Cell("-5.0"), Cell("50.0"))


def test_latencies_are_milliseconds_with_their_margin():
    found = cells(run_of(served(0, gaps_s=(0.040,)), run=0), run_of(served(0, gaps_s=(0.042,)), run=1))
    assert found["ITL p50 (ms)"] == Cell("41.0", "±12.7")


def test_a_margin_is_no_wider_than_its_mean():
    found = cells(run_of(served(0, ttft_s=0.30)), run_of(served(0, ttft_s=0.31), run=1))
    assert found["TTFT p50 (s)"] == Cell("0.305", "±.064")
    found = cells(run_of(served(0, ttft_s=1.0)), run_of(served(0, ttft_s=3.0), run=1))
    assert found["TTFT p50 (s)"] == Cell("2.00", "±12.7")


def test_what_no_run_has_is_empty():
    assert cells(run_of(served(0)))["MAPE (%)"] == Cell()


def test_a_terminal_of_80_columns_shows_every_figure():
    runs = [
        run_of(
            *(served(index, backend, finish_s=12.34 + run, gaps_s=(0.04,), predicted_finish_s=12.0)
              for index, backend in enumerate(("sim-decode", "sim-prefill"))),
            lost(2), run=run, policy=policy, scenario="article48",
        )
        for run in range(2) for policy in ("forced:gpu", "predictive")
    ]  # fmt: skip
    text = shown(*runs)
    row = next(line for line in text.splitlines() if "predictive" in line)
    assert row.split() == ["predictive", "3", "12.8", "1.00", "1.00", "1.00", "12.8", "40.0", "40.0", "6.4"]
    assert "2 lost" in text
    assert "  sim-prefill 1 " in text
    assert max(map(len, text.splitlines())) <= 80


def test_simulated_figures_say_so():
    assert "SIMULATED" in shown(run_of(served(0)), simulated=True)
    assert "SIMULATED" not in shown(run_of(served(0)))


def test_names_are_not_markup():
    assert "[red]x:llama:" in shown(run_of(served(0), policy="[red]x:llama:"))


def test_of_a_wide_fleet_the_busiest_are_shown():
    runs = run_of(*(served(index, f"b{index % 20:02}") for index in range(33)))
    text = shown(runs)
    assert "b00 2" in text
    assert "b19" not in text
    assert "and 12 more" in text


def test_it_says_what_the_margins_are_or_why_there_are_none():
    assert "no confidence" in summary_cells.certainty(summarize([run_of(served(0))]))
    assert "2 runs" in summary_cells.certainty(summarize([run_of(served(0), run=run) for run in range(2)]))
