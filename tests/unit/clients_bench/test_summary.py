"""The statistics of runs, against numbers worked out by hand."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseroute.scenarios.summary import as_json, estimate, summarize, t_quantile_975
from tests.unit.clients_bench.runs import lost, run_of, served


def figures(*items):
    (row,) = summarize([run_of(*items)])
    return {name: value.mean for name, value in row.figures.items()}


class TestOneRun:
    def test_times_of_answers(self):
        found = figures(
            served(0, ttft_s=0.1, finish_s=1.0, arrived_s=2.0),
            served(1, ttft_s=0.2, finish_s=5.0, arrived_s=3.0),
            served(2, ttft_s=0.6, finish_s=3.0, arrived_s=4.0),
            served(3, ttft_s=0.3, finish_s=3.0, arrived_s=5.0),
        )
        assert found["completion_s"] == 6.0
        assert found["ttft_mean_s"] == pytest.approx(0.3)
        assert (found["ttft_p50_s"], found["ttft_p95_s"]) == (pytest.approx(0.25), 0.6)
        assert (found["finish_mean_s"], found["finish_p50_s"], found["finish_p95_s"]) == (3.0, 3.0, 5.0)
        assert found["goodput_tokens_per_s"] == pytest.approx(40 / 6)

    def test_the_95th_percentile_is_by_nearest_rank(self):
        found = figures(*(served(index, ttft_s=float(index + 1), finish_s=100.0) for index in range(40)))
        assert found["ttft_p95_s"] == 38.0

    def test_gaps_of_all_answers_count_alike(self):
        found = figures(served(0, gaps_s=(0.1, 0.1, 0.1)), served(1, gaps_s=(0.5,)), served(2))
        assert (found["inter_token_p50_s"], found["inter_token_p95_s"]) == (0.1, 0.5)

    def test_the_error_of_forecasts_and_their_bias(self):
        found = figures(
            served(0, finish_s=2.0, predicted_finish_s=3.0),
            served(1, finish_s=4.0, predicted_finish_s=3.0),
            served(2, finish_s=4.0),
        )
        assert found["finish_mape"] == pytest.approx((0.5 + 0.25) / 2)
        assert found["finish_bias"] == pytest.approx((0.5 - 0.25) / 2)

    def test_what_was_not_answered_is_counted_and_has_no_times(self):
        found = figures(
            served(0),
            lost(1, "RESOURCE_EXHAUSTED"),
            lost(2, "UNAVAILABLE", new_tokens=500),
            lost(3, "DEADLINE_EXCEEDED"),
        )
        assert (found["refused_share"], found["failed_share"]) == (0.25, 0.5)
        assert (found["ttft_mean_s"], found["goodput_tokens_per_s"]) == (1.0, 5.0)

    def test_without_an_answer_there_are_only_shares(self):
        assert figures(lost(0)) == {"refused_share": 0.0, "failed_share": 1.0}

    def test_an_empty_run_has_no_figures(self):
        (row,) = summarize([run_of()])
        assert (row.figures, row.requests, row.codes) == ({}, 0, {})


class TestSeveralRuns:
    def test_a_mean_has_a_t_interval(self):
        # 1, 2, 3: mean 2, standard deviation 1, 2 degrees of freedom.
        value = estimate([1.0, 2.0, 3.0])
        assert value.mean == 2.0
        assert value.margin == pytest.approx(4.3027 / math.sqrt(3))
        assert value.interval == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)

    def test_one_run_has_no_interval(self):
        assert estimate([5.0]).interval is None

    @pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (10, 2.2281), (30, 2.0423), (31, 2.0395),
                                                       (40, 2.0211), (120, 1.9799), (10_000, 1.9602)])  # fmt: skip
    def test_quantiles_are_those_of_the_tables(self, freedom: int, quantile: float):
        assert t_quantile_975(freedom) == pytest.approx(quantile, abs=1e-4)

    @given(st.integers(1, 500))
    def test_more_runs_never_widen_the_quantile(self, freedom: int):
        assert 1.9599 < t_quantile_975(freedom + 1) < t_quantile_975(freedom)

    def test_ratios_are_paired_by_run_with_the_first_policy(self):
        rows = summarize(
            [
                run_of(served(0, finish_s=10.0), policy="forced", run=0),
                run_of(served(0, finish_s=5.0), policy="smart", run=0),
                run_of(served(0, finish_s=30.0), policy="smart", run=1),
                run_of(served(0, finish_s=40.0), policy="forced", run=1),
            ]
        )
        assert [(row.policy, row.runs) for row in rows] == [("forced", 2), ("smart", 2)]
        assert rows[0].ratios["completion_s"].mean == 1.0
        # 0.5 and 0.75: the ratio of the means would be 0.7.
        assert rows[1].ratios["completion_s"].mean == pytest.approx(0.625)
        assert rows[1].ratios["completion_s"].margin == pytest.approx(12.7062 * 0.125, rel=1e-4)

    def test_a_run_without_its_pair_gives_no_ratio(self):
        rows = summarize([run_of(served(0), policy="a", run=0), run_of(served(0), policy="b", run=1)])
        assert rows[1].ratios == {}
        assert rows[1].figures["completion_s"].runs == 1

    def test_a_figure_counts_the_runs_that_have_it(self):
        (row,) = summarize([run_of(served(0, ttft_s=1.0), run=0), run_of(lost(0), run=1)])
        assert (row.figures["ttft_mean_s"].runs, row.figures["failed_share"].runs) == (1, 2)
        assert row.codes == {"OK": 1, "UNAVAILABLE": 1}

    def test_scenarios_are_kept_apart(self):
        rows = summarize([run_of(served(0), scenario=name, policy=policy) for name in "ab" for policy in "pq"])
        assert [(row.scenario, row.policy) for row in rows] == [("a", "p"), ("a", "q"), ("b", "p"), ("b", "q")]


class TestBackends:
    def test_each_has_its_own_share_and_latencies(self):
        (row,) = summarize(
            [
                run_of(served(0, "cpu", gaps_s=(0.2,)), served(1, "gpu", gaps_s=(0.01,)), run=0),
                run_of(served(0, "gpu", gaps_s=(0.03,)), served(1, "gpu", gaps_s=(0.03,)), lost(2), run=1),
            ]
        )
        assert list(row.backends) == ["cpu", "gpu"]
        cpu, gpu = row.backends["cpu"], row.backends["gpu"]
        assert (cpu.requests.mean, gpu.requests.mean) == (0.5, 1.5)
        assert (cpu.figures["inter_token_p95_s"].mean, cpu.figures["inter_token_p95_s"].runs) == (0.2, 1)
        assert gpu.figures["inter_token_p95_s"].mean == pytest.approx(0.02)
        assert "completion_s" not in gpu.figures


def test_rows_are_json():
    rows = summarize([run_of(served(0), run=0), run_of(served(0), run=1), run_of(lost(0), policy="q")])
    first, second = json.loads(json.dumps(as_json(rows)))
    assert first["figures"]["completion_s"] == {"mean": 2.0, "ci95": [2.0, 2.0], "runs": 2}
    assert first["backends"]["gpu"]["requests"]["mean"] == 1.0
    assert (second["codes"], second["figures"]["failed_share"]["ci95"]) == ({"UNAVAILABLE": 1}, None)
