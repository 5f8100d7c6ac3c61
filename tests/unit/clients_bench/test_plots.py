"""What is in the plots; how they look, people have to judge."""

from __future__ import annotations

import builtins
import itertools
from pathlib import Path

import pytest

from phaseroute import plots
from phaseroute.scenarios.crossover import CrossoverMap
from tests.unit.clients_bench.runs import lost, run_of, served

MAP = CrossoverMap(
    policy="predictive", backends=("cpu", "gpu"), busy="gpu", prompt_tokens=516, new_tokens=128, backlog=(0, 1, 2),
    cached_tokens=(0, 256), choice=((1, 1), (0, 1), (0, 0)), note="by budget",
)  # fmt: skip


def burst(count: int, policy: str = "predictive", **changes):
    return run_of(
        *(
            served(index, ("cpu", "gpu")[index % 2], arrived_s=index * 0.1, ttft_s=0.1 + index % 7,
                   finish_s=8.0 + index % 5, predicted_finish_s=8.0)
            for index in range(count)
        ),
        policy=policy, **changes,
    )  # fmt: skip


@pytest.fixture
def texts():
    """Every text of a figure, as its SVG has it."""
    return plots.svg_text


@pytest.mark.parametrize("count", [3, 1000])
def test_simulated_runs_say_so_in_every_title(texts, count: int):
    for simulated in (True, False):
        run = burst(count, simulated=simulated)
        for figure in (plots.timeline(run), plots.ttft_cdf([run]), plots.predicted_vs_actual([run])):
            assert ("(SIMULATED)" in texts(figure)) is simulated
    assert "(SIMULATED)" in texts(plots.crossover(MAP))


def test_files_are_the_same_bytes_each_time(tmp_path: Path):
    first = [path.read_bytes() for path in plots.save(plots.timeline(burst(20)), tmp_path / "a")]
    again = [path.read_bytes() for path in plots.save(plots.timeline(burst(20)), tmp_path / "b.c")]
    assert first == again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg", "b.c.png", "b.c.svg"]


def test_the_timeline_has_a_bar_before_and_after_each_first_token():
    (axes,) = plots.timeline(run_of(served(0, arrived_s=1.0, ttft_s=2.0, finish_s=5.0))).axes
    spans = sorted((bar.get_x(), bar.get_width(), bar.get_alpha() == 1.0) for bar in axes.patches)
    assert spans == [(1.0, 2.0, False), (3.0, 3.0, True)]


def test_bars_of_a_lane_never_overlap():
    (axes,) = plots.timeline(burst(60)).axes
    bars = sorted((round(bar.get_y(), 6), bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches)
    for (row, _, end), (next_row, start, _) in itertools.pairwise(bars):
        assert row != next_row or end <= start + 1e-9


def test_of_many_requests_the_timeline_counts_how_many_there_are_at_a_time():
    run = burst(2000)
    (axes,) = plots.timeline(run).axes
    areas = [patch.get_data() for patch in axes.patches]
    assert len(axes.patches) < 10
    # Request seconds: what the bars would have covered.
    covered = sum(
        abs((area.values - area.baseline) @ (area.edges[1:] - area.edges[:-1])) for area in areas
    )  # fmt: skip
    assert covered == pytest.approx(sum(item.finish_s for item in run.served))


def test_requests_without_an_answer_are_crosses_with_their_code(texts):
    figure = plots.timeline(run_of(served(0), lost(1, "RESOURCE_EXHAUSTED", arrived_s=0.5)))
    assert "resource exhausted: 1" in texts(figure)
    (axes,) = figure.axes
    (crosses,) = (line for line in axes.lines if line.get_marker() == "x")
    low, high = axes.get_ylim()
    assert list(crosses.get_xdata()) == [0.5]
    assert low < crosses.get_ydata()[0] < high


def test_a_line_ends_at_the_share_that_was_answered(texts):
    figure = plots.ttft_cdf([run_of(served(0), served(1), served(2), lost(3))])
    line = figure.axes[0].lines[-1]
    assert max(line.get_ydata()) == 0.75
    assert "3 of 4 answered" in texts(figure)


def test_the_time_axis_is_logarithmic_where_times_are_far_apart():
    near = plots.ttft_cdf([run_of(served(0, ttft_s=1.0), served(1, ttft_s=2.0))])
    far = plots.ttft_cdf([run_of(served(0, ttft_s=0.0), served(1, ttft_s=60.0))])
    assert (near.axes[0].get_xscale(), far.axes[0].get_xscale()) == ("linear", "log")


def test_forecasts_have_their_error_in_the_title(texts):
    run = run_of(
        served(0, "cpu", finish_s=2.0, predicted_finish_s=3.0), served(1, finish_s=4.0, predicted_finish_s=3.0)
    )
    text = texts(plots.predicted_vs_actual([run]))
    for part in ("MAPE of 37.5 %", "bias +12.5 %", "cpu, 1", "gpu, 1", "±15 %"):
        assert part in text


def test_without_forecasts_the_plot_says_so(texts):
    assert "nothing was predicted" in texts(plots.predicted_vs_actual([run_of(served(0))]))


def test_the_map_names_backends_axes_and_note(texts):
    text = texts(plots.crossover(MAP))
    for part in ("cpu", "gpu", "requests on gpu", "516", "128", "by budget"):
        assert part in text


@pytest.mark.parametrize("draw", [plots.timeline, lambda run: plots.ttft_cdf([run]),
                                  lambda run: plots.predicted_vs_actual([run])])  # fmt: skip
@pytest.mark.parametrize(
    "run",
    [
        run_of(),
        run_of(lost(0)),
        run_of(served(0, ttft_s=0.0, finish_s=0.0, predicted_finish_s=0.0)),
        run_of(served(0, predicted_finish_s=0.0), policy="$\\frac{", scenario="_<&>"),
        run_of(*(served(index, f"b{index}", predicted_finish_s=2.0) for index in range(40)), backends=()),
    ],
    ids=["empty", "lost", "at once", "odd names", "wide"],
)
def test_whatever_a_run_holds_can_be_drawn(texts, draw, run):
    assert texts(draw(run)).startswith("<?xml")


def test_a_gallery_has_a_plot_for_each_policy_and_stems_that_are_file_names():
    runs = [burst(4, policy, scenario="trace:a/b.csv", run=run) for run in range(2) for policy in ("forced:gpu", "p")]
    made = list(plots.gallery(runs))
    assert [plot.stem for plot in made] == [
        "trace-a-b.csv_ttft", "trace-a-b.csv_forced-gpu_forecast", "trace-a-b.csv_forced-gpu_timeline",
        "trace-a-b.csv_p_forecast", "trace-a-b.csv_p_timeline",
    ]  # fmt: skip


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(plots.PlotsMissing, match=r'pip install "phaseroute\[plots\]"'):
        plots.timeline(run_of(served(0)))
