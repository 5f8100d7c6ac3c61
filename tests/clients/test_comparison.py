from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from phaseroute.aio import AsyncClient
from phaseroute.burst import BurstResult, RequestResult
from phaseroute.cli import comparison_view
from phaseroute.comparison import Spread, Turn, compare, figures, nearest_rank, schedule, summarize
from phaseroute.results import Completion, Routing, Timings, Usage
from phaseroute.v1 import inference_pb2, router_pb2
from phaseroute.workloads import Sizes, Workload, cold_prompts, warm_burst
from tests.e2e.stacks import stack

FAST = {"engine": "simulated", "simulated_prefill_rate": 50_000.0, "simulated_decode_ms": "1:1,4:2"}


def request(backend: str, token_times_s: tuple[float, ...], e2e_s: float, *, sent_s: float = 0.0) -> RequestResult:
    usage = Usage(prompt_tokens=100, cached_tokens=40, generated_tokens=len(token_times_s))
    routing = Routing("d", "p", backend, 1, None, None, token_times_s[0], e2e_s)
    answer = Completion("", (1,) * len(token_times_s), "length", usage, Timings(0, 0, 0), routing)
    return RequestResult(sent_s, token_times_s[0], e2e_s, token_times_s, answer, None)


def turn(policy: str, run: int, completion_s: float, *backends: str, workload: str = "warm") -> Turn:
    requests = tuple(request(backend, (0.5, completion_s), completion_s) for backend in backends)
    return Turn(workload, policy, run, {}, BurstResult(requests))


def workload(name: str) -> Workload:
    return Workload(name, "", 2, None, warm=False, gap_s=0.0, options={})  # type: ignore[arg-type]


def test_every_other_run_takes_the_policies_in_reverse():
    steps = schedule([workload("a"), workload("b")], ["one", "two", "three"], 2)
    assert [(step.run, step.workload.name, step.policy) for step in steps] == [
        *((0, name, policy) for name in "ab" for policy in ("one", "two", "three")),
        *((1, name, policy) for name in "ab" for policy in ("three", "two", "one")),
    ]


def test_figures_of_a_burst():
    result = BurstResult(
        (
            request("a", (1.0, 1.2, 1.4), 1.4),
            request("a", (2.0, 2.2, 3.2), 3.2, sent_s=0.8),
            request("b", (3.0, 3.2, 3.4), 3.4, sent_s=0.1),
        )
    )
    measured = figures(result)
    assert measured.completion_s == pytest.approx(4.0)
    assert measured.tokens_per_s == pytest.approx(9 / 4)
    assert (measured.ttft_p50_s, measured.ttft_p95_s) == (2.0, 3.0)
    assert measured.inter_token_p50_s == pytest.approx(0.2)
    assert measured.inter_token_p95_s == pytest.approx(1.0)
    assert measured.cached_tokens == 40


@given(st.lists(st.floats(0, 100), min_size=1), st.sampled_from([0.05, 0.5, 0.95, 1.0]))
def test_a_percentile_is_a_value_that_enough_others_do_not_exceed(values, share):
    found = nearest_rank(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_a_ratio_is_to_the_best_forced_burst_of_the_same_run():
    rows = summarize(
        [
            turn("forced:a", 0, 10.0, "a", "a"),
            turn("forced:b", 0, 20.0, "b", "b"),
            turn("two_phase", 0, 5.0, "a", "b"),
            turn("two_phase", 1, 8.0, "a", "a"),
            turn("forced:b", 1, 16.0, "b", "b"),
            turn("forced:a", 1, 32.0, "a", "a"),
        ]
    )
    by_policy = {row.policy: row for row in rows}
    assert list(by_policy) == ["forced:a", "forced:b", "two_phase"]
    routed = by_policy["two_phase"]
    assert routed.ratio == Spread(0.5, 0.5, 0.5)
    assert by_policy["forced:a"].ratio == Spread(1.5, 1.0, 2.0)
    assert routed.figures["completion_s"] == Spread(6.5, 5.0, 8.0)
    assert routed.sent == {"a": (1, 2), "b": (1, 0)}
    assert (routed.workload, routed.requests) == ("warm", 2)


def test_without_a_forced_burst_there_is_no_ratio():
    assert summarize([turn("two_phase", 0, 5.0, "a")])[0].ratio is None


def test_bursts_of_other_sizes_and_workloads_are_kept_apart():
    rows = summarize(
        [
            turn("forced:a", 0, 1.0, "a"),
            turn("forced:a", 0, 4.0, "a", "a"),
            turn("forced:a", 0, 8.0, "a", "a", workload="cold"),
        ]
    )
    assert [(row.workload, row.requests) for row in rows] == [("warm", 1), ("warm", 2), ("cold", 2)]
    assert all(row.ratio == Spread(1.0, 1.0, 1.0) for row in rows)


def test_figures_that_a_run_lacks_are_left_out():
    row = summarize([Turn("cold", "p", 0, {}, BurstResult((request("a", (1.0,), 1.0),)))])[0]
    assert "inter_token_p50_s" not in row.figures
    assert row.figures["ttft_p50_s"].median == 1.0


async def test_a_comparison_over_real_services():
    begun = []

    @contextmanager
    def watch(step):
        begun.append((step.workload.name, step.policy))
        yield lambda *_: None

    async with (
        stack({"a": FAST, "b": FAST}) as running,
        AsyncClient(running.hosted.server.target) as client,
    ):
        sizes = Sizes(prompt_tokens=200, new_tokens=4)
        workloads = [await warm_burst(client, 3, sizes), await cold_prompts(client, 3, sizes)]
        steps = schedule(workloads, ["forced:a", "forced:b"], 2)
        turns = [made async for made in compare(client, steps, ["a", "b"], watch)]
    assert begun == [(step.workload.name, step.policy) for step in steps]
    for made in turns:
        requests = made.result.requests
        assert {request.backend for request in requests} == {made.policy.removeprefix("forced:")}
        cached = [request.answer.usage.cached_tokens for request in requests]
        if made.workload == "warm":
            assert set(made.warmed) == {"a", "b"}
            assert all(usage.cached_tokens > 100 for usage in made.warmed.values())
            assert min(cached) > 100
        else:
            assert not made.warmed
            # One token is one letter here, so a prompt of an earlier turn may share a few.
            assert max(cached) < 10


def shown(renderable, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


ROWS = summarize(
    [
        turn("forced:llama", 0, 10.0, "llama", "llama"),
        turn("forced:mlx", 0, 31.0, "mlx", "mlx"),
        turn("two_phase", 0, 9.0, "llama", "mlx"),
    ]
)


def test_the_table_fits_and_keeps_names_whole():
    text = shown(comparison_view.table(ROWS))
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["forced:llama", "llama", "2", "0.500", "0.500", "9500", "9500", "10.0", "1.00"] in lines
    assert ["two_phase", "llama", "1", "0.500", "0.500", "8500", "8500", "9.00", "0.900"] in lines
    assert ["mlx", "1"] in lines


def test_the_simulated_pairs_longer_names_fit_too():
    rows = summarize([turn("forced:sim-prefill", 0, 10.0, "sim-prefill"), turn("two_phase", 0, 9.87, "sim-decode")])
    text = shown(comparison_view.table(rows))
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["forced:sim-prefill", "sim-prefill", "1", "0.500", "0.500", "9500", "9500", "10.0", "1.00"] in lines
    assert ["two_phase", "sim-decode", "1", "0.500", "0.500", "9370", "9370", "9.87", "0.987"] in lines


def test_several_runs_show_their_range():
    rows = summarize([turn("two_phase", 0, 5.0, "a", "b"), turn("two_phase", 1, 8.0, "a", "a")])
    text = shown(comparison_view.table(rows), 120)
    assert "6.50 (5.00-8.00)" in text
    assert "a 1-2" in text
    assert "b 0-1" in text


def test_the_verdict_says_who_is_faster_and_what_routing_made_of_it():
    rates = inference_pb2.IsolatedRates(prefill_tokens_per_s=150, decode_tokens_per_s=85)
    status = inference_pb2.BackendStatus(isolated_rates=rates)
    lines = comparison_view.verdict(ROWS, [router_pb2.BackendEntry(name="llama", status=status)]).splitlines()
    assert lines == [
        "One request alone: 150 prompt tokens and 85 new tokens a second with llama.",
        "warm (2 requests): llama is 3.1 times as fast as mlx; two_phase sent 1 to llama and 1 to mlx and took 0.90 "
        "times as long as the best of them alone.",
    ]


def test_small_differences_are_not_called_any():
    rows = summarize([turn("forced:a", 0, 10.0, "a"), turn("forced:b", 0, 10.2, "b")])
    assert comparison_view.verdict(rows, []) == "warm (1 request): a and b are about as fast."
