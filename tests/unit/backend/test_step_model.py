from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_service.step_model import MIN_SAMPLES, StepFit
from service_kit.step_time import StepModel, StepShape

PLANTED = StepModel(
    base_s=0.004, per_token_s=3e-4, per_row_s=1.1e-3, per_attended_s=2e-7, samples=0, residual_p90_s=0.0
)
SEEN = [
    StepShape(1, 1, 600.0),
    StepShape(4, 4, 3000.0),
    StepShape(8, 8, 8000.0),
    StepShape(128, 1, 40_000.0),
    StepShape(200, 4, 60_000.0),
]
"""Shapes within what `mixed` makes, to compare predictions at."""


def mixed(generator: np.random.Generator, steps: int) -> Iterator[StepShape]:
    """A serving mix: one to eight decode rows, in every third step a prefill chunk beside them."""
    for _ in range(steps):
        rows = int(generator.integers(1, 9))
        chunk = int(generator.integers(16, 256)) if generator.random() < 0.3 else 0
        attended = rows * generator.uniform(100, 1500) + chunk * generator.uniform(50, 800)
        yield StepShape(rows + chunk, rows, attended)


def fitted(fit: StepFit) -> StepModel:
    model = fit.fit()
    assert model is not None
    return model


def coefficients(model: StepModel) -> tuple[float, ...]:
    return model.base_s, model.per_token_s, model.per_row_s, model.per_attended_s


def test_seconds_is_the_formula() -> None:
    model = StepModel(1.0, 0.1, 0.01, 0.001, samples=0, residual_p90_s=0.0)
    assert model.seconds(StepShape(tokens=2, rows=3, attended=4.0)) == pytest.approx(1.234)


def test_exact_times_give_the_exact_coefficients() -> None:
    fit = StepFit()
    for shape in mixed(np.random.default_rng(0), 400):
        fit.observe(shape, PLANTED.seconds(shape))
    assert coefficients(fitted(fit)) == pytest.approx(coefficients(PLANTED), rel=1e-6)
    assert fitted(fit).residual_p90_s < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_stalls_leave_the_planted_coefficients(seed: int) -> None:
    generator = np.random.default_rng(seed)
    fit = StepFit()
    for shape in mixed(generator, 1500):
        stall = generator.uniform(2, 10) if generator.random() < 0.05 else 1.0
        fit.observe(shape, PLANTED.seconds(shape) * generator.lognormal(0, 0.05) * stall)
    model = fitted(fit)
    assert coefficients(model) == pytest.approx(coefficients(PLANTED), rel=0.15)
    for shape in SEEN:
        assert model.seconds(shape) == pytest.approx(PLANTED.seconds(shape), rel=0.03)
    assert model.samples == 512


def test_a_few_prefill_steps_are_not_the_outliers_of_many_decode_steps() -> None:
    generator = np.random.default_rng(1)
    fit = StepFit()
    for _ in range(250):
        rows = int(generator.integers(1, 5))
        fit.observe(StepShape(rows, rows, 500.0 * rows), 0.01 * generator.lognormal(0, 0.002))
    for chunk in (32, 64, 128, 256):  # time grows faster than tokens, so no coefficients fit all of these
        fit.observe(StepShape(chunk, 0, chunk * chunk / 2), 0.01 + 1e-4 * chunk**1.3)
    model = fitted(fit)
    assert model.seconds(StepShape(256, 0, 256 * 128.0)) == pytest.approx(0.145, rel=0.3)
    assert model.seconds(StepShape(2, 2, 1000.0)) == pytest.approx(0.01, rel=0.05)


STEPS = st.lists(
    st.tuples(
        st.builds(StepShape, st.integers(0, 512), st.integers(0, 16), st.floats(0, 1e6)),
        st.floats(0, 10),
    ),
    min_size=MIN_SAMPLES,
    max_size=80,
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_no_coefficient_is_ever_negative(steps: list[tuple[StepShape, float]]) -> None:
    fit = StepFit(window=64)
    for shape, seconds in steps:
        fit.observe(shape, seconds)
    model = fitted(fit)
    assert all(0 <= value < math.inf for value in (*coefficients(model), model.residual_p90_s))


def test_a_falling_trend_is_not_fitted_by_a_negative_price() -> None:
    generator = np.random.default_rng(2)
    fit = StepFit()
    for _ in range(200):
        rows = int(generator.integers(1, 9))
        fit.observe(StepShape(rows, rows, 100.0 * rows), 0.02 - 0.001 * rows)
    base_s, *others = coefficients(fitted(fit))
    assert others == [0.0, 0.0, 0.0]
    assert 0.012 < base_s < 0.019


def test_a_slowdown_shows_once_the_window_has_turned_over() -> None:
    generator = np.random.default_rng(3)
    fit = StepFit(window=128)
    for shape in mixed(generator, 500):
        fit.observe(shape, PLANTED.seconds(shape))
    for shape in mixed(generator, 500):
        fit.observe(shape, 2 * PLANTED.seconds(shape))
    assert coefficients(fitted(fit)) == pytest.approx([2 * value for value in coefficients(PLANTED)], rel=1e-6)


def test_a_long_stretch_of_decode_does_not_forget_what_prefill_costs() -> None:
    generator = np.random.default_rng(4)
    fit = StepFit()
    for shape in mixed(generator, 200):
        fit.observe(shape, PLANTED.seconds(shape))
    for _ in range(2000):
        shape = StepShape(2, 2, generator.uniform(500, 3000))
        fit.observe(shape, PLANTED.seconds(shape))
    assert coefficients(fitted(fit)) == pytest.approx(coefficients(PLANTED), rel=1e-6)


def test_too_few_steps_give_no_model() -> None:
    fit = StepFit()
    for _ in range(MIN_SAMPLES - 1):
        fit.observe(StepShape(4, 4, 100.0), 0.01)
    assert fit.fit() is None
    fit.observe(StepShape(4, 4, 100.0), 0.01)
    assert fit.fit() is not None


def test_steps_all_alike_are_priced_per_token() -> None:
    generator = np.random.default_rng(5)
    fit = StepFit()
    for _ in range(100):
        fit.observe(StepShape(4, 4, 2000.0), 0.04 * generator.lognormal(0, 0.02))
    model = fitted(fit)
    assert model.per_token_s == pytest.approx(0.01, rel=0.02)
    assert (model.base_s, model.per_row_s, model.per_attended_s) == (0.0, 0.0, 0.0)


def test_a_trend_within_the_noise_is_no_price() -> None:
    kept = 0
    for seed in range(20):
        generator = np.random.default_rng(seed)
        fit = StepFit()
        for _ in range(200):
            fit.observe(StepShape(4, 4, generator.uniform(1980, 2020)), 0.04 * generator.lognormal(0, 0.02))
        kept += fitted(fit).per_attended_s > 0
    assert kept <= 1


def test_a_small_price_beyond_the_noise_is_kept() -> None:
    generator = np.random.default_rng(6)
    fit = StepFit()
    for _ in range(600):
        shape = StepShape(4, 4, generator.uniform(0, 4000))
        seconds = 0.04 + 8e-7 * shape.attended  # at most 8 % of the step, under 5 % of noise
        fit.observe(shape, seconds * generator.lognormal(0, 0.05))
    assert fitted(fit).per_attended_s == pytest.approx(8e-7, rel=0.4)


def test_pure_decode_prices_rows_as_tokens_and_still_predicts_decode() -> None:
    fit = StepFit()
    for step in range(200):
        rows = 1 + step % 4
        fit.observe(StepShape(rows, rows, rows * (500.0 + step)), 0.01 + 0.002 * rows)
    assert coefficients(fitted(fit)) == pytest.approx((0.01, 0.002, 0.0, 0.0), abs=1e-9)


def test_p90_is_of_all_samples_in_seconds() -> None:
    fit = StepFit()
    for step in range(100):
        fit.observe(StepShape(1, 1, 1.0), 0.1 if step % 5 else 0.5)
    model = fitted(fit)
    assert model.per_token_s == pytest.approx(0.1)
    assert model.residual_p90_s == pytest.approx(0.4)


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf])
def test_a_time_that_no_clock_measures_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="monotonic"):
        StepFit().observe(StepShape(1, 1, 1.0), seconds)


def test_a_window_too_short_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="32 or more"):
        StepFit(window=31)
