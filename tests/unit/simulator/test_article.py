"""The article's bursts through the real policy, ledger, scheduler and cache code, in virtual time."""

from __future__ import annotations

import pytest

from simulator.article import run_burst


@pytest.mark.parametrize(("requests", "to_cpu"), [(8, 1), (48, 6)])
def test_two_phase_sends_as_many_requests_to_the_cpu_as_published(requests, to_cpu):
    assert run_burst(requests, "two_phase").sent_to("cpu") == to_cpu


def test_the_eighth_request_is_the_one_that_goes_to_the_cpu():
    outcomes = run_burst(8, "two_phase").outcomes
    assert [outcome.backend for outcome in outcomes] == ["gpu"] * 7 + ["cpu"]


def test_the_eighth_requests_table_is_the_published_one_but_for_the_decode_progress():
    *_, last = run_burst(8, "two_phase").outcomes
    table = {candidate.name: candidate for candidate in last.candidates}
    cpu, gpu = table["cpu"], table["gpu"]
    assert (cpu.active, cpu.queued, cpu.prefill_tokens, cpu.decode_tokens(128)) == (0, 0, 20, 128)
    assert (gpu.active, gpu.queued, gpu.prefill_tokens) == (4, 3, 80)
    assert gpu.decode_tokens(128) == pytest.approx(1000, rel=0.03)
    assert last.choice.prices["cpu"].score_s == pytest.approx(3.118, abs=0.001)
    assert last.choice.prices["gpu"].score_s == pytest.approx(3.444, rel=0.03)


@pytest.mark.parametrize("requests", [8, 48])
def test_every_choice_is_the_lowest_score_and_every_prefix_is_warm(requests):
    for outcome in run_burst(requests, "two_phase").outcomes:
        scores = {name: price.score_s for name, price in outcome.choice.prices.items()}
        assert outcome.backend == min(scores, key=scores.get)
        assert outcome.cached_tokens == 496


@pytest.mark.parametrize(("requests", "published_cut"), [(8, 0.098), (48, 0.110)])
def test_mixed_routing_cuts_completion_time_about_as_published(requests, published_cut):
    forced, mixed = (run_burst(requests, policy).completion_s for policy in ("forced:gpu", "two_phase"))
    assert 1 - mixed / forced == pytest.approx(published_cut, abs=0.03)


def test_a_run_repeats_exactly():
    assert run_burst(8, "two_phase") == run_burst(8, "two_phase")
