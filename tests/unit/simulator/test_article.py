"""The article's bursts through the real policy, ledger, scheduler and cache code, in virtual time."""

from __future__ import annotations

import pytest

from simulator.article import run_burst


@pytest.mark.parametrize(
    ("requests", "policy", "published_s"),
    [(8, "forced:gpu", 11.47), (8, "two_phase", 10.35), (48, "forced:gpu", 68.43), (48, "two_phase", 60.88)],
)
def test_completion_times_are_the_published_ones(requests, policy, published_s):
    assert run_burst(requests, policy).completion_s == pytest.approx(published_s, rel=0.05)


def test_two_phase_makes_the_published_choices():
    assert [served.backend for served in run_burst(8, "two_phase").run.served] == ["gpu"] * 7 + ["cpu"]
    assert run_burst(48, "two_phase").sent_to("cpu") == 6


def test_the_eighth_request_on_the_cpu_fares_as_published():
    eighth = run_burst(8, "two_phase").run.served[-1]
    assert eighth.ttft_s == pytest.approx(0.339, abs=0.07)
    assert eighth.finish_s == pytest.approx(3.681, rel=0.05)


def test_the_eighth_requests_table_is_the_published_one_but_for_the_decode_progress():
    *_, last = run_burst(8, "two_phase").decisions
    table = {candidate.name: candidate for candidate in last.candidates}
    cpu, gpu = table["cpu"], table["gpu"]
    assert (cpu.active, cpu.queued, cpu.prefill_tokens, cpu.decode_tokens(128)) == (0, 0, 20, 128)
    assert (gpu.active, gpu.queued, gpu.prefill_tokens) == (4, 3, 80)
    assert gpu.decode_tokens(128) == pytest.approx(1000, rel=0.03)
    assert last.choice.prices["cpu"].score_s == pytest.approx(3.118, abs=0.001)
    assert last.choice.prices["gpu"].score_s == pytest.approx(3.444, rel=0.03)


@pytest.mark.parametrize("requests", [8, 48])
def test_every_choice_is_the_lowest_score_and_every_prefix_is_warm(requests):
    result = run_burst(requests, "two_phase")
    for routed, served in zip(result.decisions, result.run.served, strict=True):
        scores = {name: price.score_s for name, price in routed.choice.prices.items()}
        assert served.backend == min(scores, key=scores.get)
        assert served.cached_tokens == 496


def test_a_run_repeats_exactly():
    assert run_burst(8, "two_phase").run == run_burst(8, "two_phase").run
