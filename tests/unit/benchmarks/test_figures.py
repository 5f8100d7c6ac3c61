import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.side_by_side.answer import Answer, Played, Usage
from benchmarks.side_by_side.figures import (
    FIGURES,
    Figure,
    Ratio,
    figures_of,
    lines,
    percentile,
    ratio,
    reused_share,
    span_s,
    tokens_per_s,
    worst_gap_s,
)
from benchmarks.side_by_side.workload import WORKLOADS

moments = st.lists(st.floats(0, 1000), max_size=30).map(sorted)


def answer(sent_s: float, *arrivals_s: float, cached: int = 0, prompt: int = 10) -> Answer:
    return Answer(sent_s, arrivals_s, arrivals_s[-1] + 1, Usage(prompt, cached, len(arrivals_s)), first_token=7)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_the_least_value_that_covers_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_percentiles_of_a_burst_of_eight() -> None:
    values = [8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0]
    assert percentile(values, 0.5) == 4.0
    assert percentile(values, 0.95) == 8.0
    assert percentile(values, 1.0) == 8.0


@given(st.lists(moments, max_size=4), st.floats(0, 1000), st.floats(0, 1000))
def test_the_worst_gap_is_one_that_touches_the_window(streams: list[list[float]], first: float, second: float) -> None:
    begun_s, ended_s = sorted((first, second))
    worst = worst_gap_s(streams, begun_s, ended_s)
    gaps = [pair for stream in streams for pair in pairwise(stream)]
    touching = [b - a for a, b in gaps if not (b <= begun_s or a >= ended_s)]
    assert worst == (max(touching) if touching else 0.0)


def test_a_gap_counts_whole_when_the_window_only_cuts_it_and_not_at_all_outside() -> None:
    stream = [0.0, 5.0, 6.0, 8.0, 20.0]
    assert worst_gap_s([stream], 4.0, 7.0) == 5.0
    assert worst_gap_s([stream], 5.0, 8.0) == 2.0
    assert worst_gap_s([stream, [6.5, 9.5]], 5.5, 8.0) == 3.0
    assert worst_gap_s([[6.0]], 0.0, 10.0) == 0.0


def test_a_burst_lasts_from_the_first_request_to_the_last_end() -> None:
    burst = (answer(1.0, 3.0, 4.0), answer(1.5, 6.0, 9.0), answer(2.0, 2.5, 3.0))
    assert span_s(burst) == 9.0  # the last token at 9, its end one later, the first sent at 1
    assert tokens_per_s(burst) == 6 / 9
    assert [each.ttft_s for each in burst] == [2.0, 4.5, 0.5]


def test_the_reused_share_weighs_prompts_by_their_length() -> None:
    assert reused_share([answer(0, 1, cached=90, prompt=100), answer(0, 1, cached=0, prompt=20)]) == 0.75


def test_which_way_round_a_ratio_is() -> None:
    assert ratio(Figure("w", "s", Ratio.PEER_BY_OURS), ours=2.0, peer=6.0) == 3.0
    assert ratio(Figure("w", "tokens/s", Ratio.OURS_BY_PEER), ours=6.0, peer=2.0) == 3.0
    assert ratio(Figure("w", "s", Ratio.NONE), ours=6.0, peer=2.0) is None
    assert ratio(Figure("w", "s", Ratio.OURS_BY_PEER), ours=6.0, peer=0.0) is None


def test_the_figure_of_a_line_is_the_median_of_each_rounds_ratio() -> None:
    ours = [{"churn": {"revisits s": value, "share of prompt reused": 0.5}} for value in (1.0, 10.0, 2.0)]
    peer = [{"churn": {"revisits s": value, "share of prompt reused": 0.0}} for value in (3.0, 20.0, 2.0)]
    revisits, share = lines(ours, peer)
    assert revisits.figure.headline == "churn_ratio"
    assert (revisits.ours, revisits.peer) == (2.0, 3.0)
    assert revisits.ratios == (3.0, 2.0, 1.0)
    assert revisits.ratio == 2.0  # not 3 / 2, the ratio of the medians
    assert share.ratio is None


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_line_of_a_workload_is_measured_and_nothing_else(workload: str) -> None:
    played = Played((answer(0.0, 2.0, 3.0), answer(1.0, 4.0)), beside_arrivals_s=((0.5, 2.5),))
    names = {figure.name for figure in FIGURES if figure.workload == workload}
    assert set(figures_of(workload, played)) == names


def test_the_headlines_are_these() -> None:
    found = {figure.headline: (figure.workload, figure.ratio) for figure in FIGURES if figure.headline}
    assert found == {
        "single_stream_ratio": ("single", Ratio.PEER_BY_OURS),
        "steady_ratio": ("steady", Ratio.PEER_BY_OURS),
        "ttft_p95_ratio": ("steady", Ratio.PEER_BY_OURS),
        "seen_once_ratio": ("seen_once", Ratio.PEER_BY_OURS),
        "cold_ratio": ("cold", Ratio.PEER_BY_OURS),
        "churn_ratio": ("churn", Ratio.PEER_BY_OURS),
        "gap_ratio": ("long", Ratio.PEER_BY_OURS),
        "memory_ratio": ("memory", Ratio.OURS_BY_PEER),
    }


def test_the_long_prompts_gap_is_looked_for_until_its_first_token() -> None:
    long_one = replace(answer(10.0, 20.0, 50.0), ended_s=60.0)
    streams = ((8.0, 11.0, 19.0, 21.0), (21.0, 55.0))
    figures = figures_of("long", Played((long_one,), streams))
    assert figures["worst gap beside it s"] == 8.0
    assert math.isclose(figures["TTFT s"], 10.0)
