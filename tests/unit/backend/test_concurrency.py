"""Which batch size a backend runs by its step model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_service.concurrency import MIN_INTERVAL_S, NEAR_BEST, Concurrency, best_pace, paces
from service_kit.step_time import StepModel

CONTEXT_TOKENS = 300.0


def model_of(steps_ms: dict[int, float]) -> StepModel:
    """Decode steps by batch size, linear in between and beyond."""
    sizes = sorted(steps_ms)
    slope_s = (steps_ms[sizes[-1]] - steps_ms[sizes[0]]) / (sizes[-1] - sizes[0]) / 1000
    corrections = tuple((size, steps_ms[size] / 1000 - slope_s * size) for size in sizes)
    return StepModel(0.0, 0.0, slope_s, 0.0, samples=100, residual_p90_s=0.0, row_corrections_s=corrections)


ARTICLE = model_of({1: 3.41, 3: 36, 4: 43})
CPU = model_of({1: 12, 2: 23, 4: 40, 8: 65})
FLAT = model_of({1: 12, 16: 13})


def test_the_articles_gpu_runs_one_request_at_a_time():
    choice = Concurrency(16).update(ARTICLE, CONTEXT_TOKENS, 0.0)
    assert choice.max_active == 1
    assert choice.reason == "auto: 1 of at most 16; 293 tokens/s at 3.4 ms a step, 2 would make 101 at 20 ms"


def test_a_cpu_that_gains_with_the_batch_runs_as_many_as_the_time_between_two_tokens_allows():
    """8 make 123 tokens/s; 11 would make 125 within the target, hardly more."""
    choice = Concurrency(16).update(CPU, CONTEXT_TOKENS, 0.0)
    assert choice.max_active == 8
    assert Concurrency(16, target_s=0.05).update(CPU, CONTEXT_TOKENS, 0.0).max_active == 5
    assert Concurrency(16, target_s=0.3).update(CPU, CONTEXT_TOKENS, 0.0).max_active == 8


def test_where_batching_costs_nothing_the_batch_is_nearly_as_large_as_it_may_be():
    assert Concurrency(16).update(FLAT, CONTEXT_TOKENS, 0.0).max_active == 16


def test_a_slow_engine_may_take_twice_a_step_alone():
    slow = model_of({1: 120, 4: 165, 16: 220})
    assert Concurrency(16).update(slow, CONTEXT_TOKENS, 0.0).max_active > 1
    assert Concurrency(16, target_s=0.1).update(slow, CONTEXT_TOKENS, 0.0).max_active == 1


def test_long_contexts_make_the_batch_smaller():
    model = StepModel(0.01, 0.0, 0.001, 5e-6, samples=100, residual_p90_s=0.0)
    sizes = [Concurrency(16).update(model, context, 0.0).max_active for context in (100.0, 4000.0)]
    assert sizes[1] < sizes[0]


MODELS = st.builds(
    StepModel,
    st.floats(0, 0.1),
    st.floats(0, 0.01),
    st.floats(0, 0.05),
    st.floats(0, 1e-5),
    samples=st.just(100),
    residual_p90_s=st.just(0.0),
    row_corrections_s=st.lists(st.floats(-0.05, 0.05), max_size=3).map(
        lambda values: tuple((2**index, value) for index, value in enumerate(values))
    ),
)


@given(MODELS, st.integers(1, 64), st.floats(1e-4, 1.0))
def test_it_keeps_the_target_where_it_can_and_comes_near_the_best_with_the_fewest_rows(model, largest, target_s):
    options = paces(model, CONTEXT_TOKENS, largest)
    chosen = best_pace(options, target_s)
    within = [pace for pace in options if pace.step_s <= target_s]
    assert chosen in within or (not within and chosen.rows == 1)
    best = max((pace.tokens_per_s for pace in within), default=0.0)
    assert chosen.tokens_per_s >= NEAR_BEST * best
    assert all(pace.tokens_per_s < NEAR_BEST * best for pace in within if pace.rows < chosen.rows)


def test_it_waits_for_a_model():
    concurrency = Concurrency(16)
    assert concurrency.update(None, CONTEXT_TOKENS, 0.0).max_active == 4
    assert "until enough steps were measured" in concurrency.choice.reason
    assert Concurrency(2).choice.max_active == 2
    assert concurrency.update(ARTICLE, CONTEXT_TOKENS, 0.1).max_active == 1


def test_a_little_more_throughput_is_no_reason_to_change():
    concurrency = Concurrency(4)
    assert concurrency.update(model_of({1: 10, 2: 20.2, 4: 42}), CONTEXT_TOKENS, 0.0).max_active == 1
    assert concurrency.update(model_of({1: 10, 2: 18.6, 4: 42}), CONTEXT_TOKENS, 10.0).max_active == 1
    assert concurrency.update(model_of({1: 10, 2: 17.0, 4: 42}), CONTEXT_TOKENS, 20.0).max_active == 2


def test_a_target_that_is_missed_by_a_little_is_no_reason_to_change():
    concurrency = Concurrency(8, target_s=0.054)
    assert concurrency.update(CPU, CONTEXT_TOKENS, 0.0).max_active == 6
    slower, slow = (model_of({1: 12 * by, 2: 23 * by, 4: 40 * by, 8: 65 * by}) for by in (1.05, 1.2))
    assert concurrency.update(slower, CONTEXT_TOKENS, 10.0).max_active == 6
    assert concurrency.update(slow, CONTEXT_TOKENS, 20.0).max_active < 6


def test_it_does_not_change_more_often_than_every_two_seconds():
    concurrency = Concurrency(8)
    assert concurrency.update(CPU, CONTEXT_TOKENS, 0.0).max_active == 7
    assert concurrency.update(ARTICLE, CONTEXT_TOKENS, 0.9 * MIN_INTERVAL_S).max_active == 7
    assert concurrency.update(ARTICLE, CONTEXT_TOKENS, MIN_INTERVAL_S).max_active == 1
    assert concurrency.update(CPU, CONTEXT_TOKENS, 1.5 * MIN_INTERVAL_S).max_active == 1


@pytest.mark.parametrize("largest", [0, -3])
def test_no_batch_is_refused(largest):
    with pytest.raises(ValueError, match="give 1 or more"):
        Concurrency(largest)


@pytest.mark.parametrize("target_s", [0.0, -1.0, math.nan])
def test_a_target_that_nothing_can_meet_is_refused(target_s):
    with pytest.raises(ValueError, match="give more than 0"):
        Concurrency(4, target_s)
