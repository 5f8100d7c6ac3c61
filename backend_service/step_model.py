"""How long an engine step takes, learned from the steps that ran."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from backend_service.least_squares import Floats, non_negative
from backend_service.step_samples import ENOUGH_ALIKE, Predict, StepSamples
from service_kit.step_time import StepModel, StepShape

MIN_SAMPLES = 16
"""Fewer steps give no model."""
_OUTLIER_MADS = 5.0
_OUTLIER_FLOOR = 0.05
"""Durations closer to what is usual than this share of it are never outliers, however quiet the rest is."""
_SIGNIFICANT = 9.0
"""A coefficient is taken for noise when leaving it out adds less than this many times the mean squared error to the
summed one: three standard errors, squared."""
_MISFIT = 0.02
_MISFIT_ERRORS = 4.0
"""Decode of a batch size is off the line if its median step is, by more than the share `_MISFIT` and by more than so
many standard errors. There are many sizes, so chance has many tries."""
_WEIGHT_FLOOR = 0.01
"""No step weighs more than one of this share of the median duration."""
_ROWS = 2

_Kinds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IsolatedRates:
    """Speeds of one request alone."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class StepTimes(Protocol):
    """What a scheduler learns step times with."""

    newest_s: float | None
    """When the newest sample was measured, on the scheduler's clock; None: unknown."""

    def observe(self, shape: StepShape, seconds: float, at_s: float | None = None) -> None:
        """Record a step that finished at `at_s`."""

    def fit(self) -> StepModel | None:
        """The model of what was recorded; None while that is too little."""


class KnownStepTimes:
    """For an engine whose step times are known, as in a simulation: learns nothing, and costs nothing."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self.newest_s: float | None = None

    def observe(self, shape: StepShape, seconds: float, at_s: float | None = None) -> None:
        """See `StepTimes.observe`."""
        self.newest_s = at_s

    def fit(self) -> StepModel | None:
        """The model that was given."""
        return self._model


class StepFit:
    """Fits a `StepModel` to the latest steps, of every kind some (`StepSamples`). One thread.

    The fit minimises relative errors. Noise grows with the duration, and a forecast adds up many short steps; absolute
    errors would let a few long prefill steps set the price of decode. It is exact non-negative least squares, twice:
    the first fit weighs by measured time, under which a stalled step counts little, and finds the outliers, each
    among steps of its own kind; the second weighs by fitted time, which is free of bias.

    Where decode is off that line for some batch size, the sizes get prices of their own (`row_corrections_s`), and the
    line is fitted a third time, to what they leave open: prompt tokens and contexts.

    Where the samples cannot tell (steps alike, proportional columns, differences below noise), several models explain
    them equally well. Then the one with the fewest coefficients is taken, and among those the first of per_token, base,
    per_row, per_attended: steps all alike give per_token alone. That overprices prefill, which is safer for a router
    than prefill that looks free, and lasts until the first step of another shape.
    """

    def __init__(self, window: int = 512) -> None:
        """Half of the window is for steps with prefill; an eighth for pure decode of each batch size."""
        if window < 2 * MIN_SAMPLES:
            raise ValueError(f"a window of {window} steps is too short to fit; use {2 * MIN_SAMPLES} or more")
        half = window // 2
        self._samples = StepSamples(
            prefill_window=half, decode_window=max(2 * ENOUGH_ALIKE, half // 4), decode_limit=half
        )
        self._model: StepModel | None = None
        self.newest_s: float | None = None

    def seed(self, shape: StepShape, seconds: float, at_s: float | None = None) -> None:
        """Record a step of a calibration; `at_s` as for `observe`."""
        self._samples.seed(shape, _checked(seconds))
        self.newest_s = at_s

    def observe(self, shape: StepShape, seconds: float, at_s: float | None = None) -> None:
        """Record a step that finished at `at_s`. Raises `ValueError` unless `seconds` is finite and not negative."""
        self._samples.add(shape, _checked(seconds), self._predict)
        self.newest_s = at_s

    def fit(self) -> StepModel | None:
        """The model of the steps kept; None below `MIN_SAMPLES` of them."""
        steps, kinds = self._samples.table(self._predict)
        self._model = _fit(steps[:, :4], steps[:, 4], kinds) if len(steps) >= MIN_SAMPLES else None
        return self._model

    @property
    def _predict(self) -> Predict | None:
        model = self._model
        return None if model is None else lambda steps: _seconds(model, steps)


def _checked(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"a step cannot have taken {seconds} s; measure it with a monotonic clock")
    return seconds


def _fit(design: Floats, measured: Floats, kinds: _Kinds) -> StepModel:
    floor = max(_WEIGHT_FLOOR * float(np.median(measured)), 1e-9)
    first = non_negative(design, measured, 1 / np.maximum(measured, floor), negligible=0.0)
    kept = _inliers(measured / np.maximum(design @ first, floor), kinds)
    fitted = np.maximum(design @ first, floor)[kept]
    line = non_negative(design[kept], measured[kept], 1 / fitted, negligible=_SIGNIFICANT / np.count_nonzero(kept))
    sizes = _sizes_off(design[kept] @ line, measured[kept], kinds[kept], floor)
    knots: tuple[tuple[int, float], ...] = ()
    if len(sizes):
        line, knots = _with_corrections(line, design[kept], measured[kept], kinds[kept], sizes, floor)
    base_s, per_token_s, per_row_s, per_attended_s = map(float, line)
    model = StepModel(
        base_s=base_s,
        per_token_s=per_token_s,
        per_row_s=per_row_s,
        per_attended_s=per_attended_s,
        samples=len(measured),
        residual_p90_s=0.0,
        row_corrections_s=knots,
    )
    return replace(model, residual_p90_s=float(np.percentile(np.abs(measured - _seconds(model, design)), 90)))


def _seconds(model: StepModel, design: Floats) -> Floats:
    """`StepModel.seconds` of many steps, (n,)."""
    line = np.array([model.base_s, model.per_token_s, model.per_row_s, model.per_attended_s])
    seconds: Floats = design @ line
    if model.row_corrections_s:
        sizes, corrections = zip(*model.row_corrections_s, strict=True)
        rows = design[:, _ROWS]
        seconds = np.where(rows >= 1, seconds + np.interp(rows, sizes, corrections), seconds)
    return np.maximum(seconds, 0.0)


def _inliers(ratio: Floats, kinds: _Kinds) -> NDArray[np.bool_]:
    """Which steps took about as long as is usual for their kind: within a few median absolute deviations (MAD). Judged
    all together, the few steps of one kind would be the outliers. `ratio` is measured to fitted time."""
    deviation = np.abs(ratio / np.maximum(_typical(ratio, kinds), 1e-9) - 1)
    return deviation <= np.maximum(_OUTLIER_MADS * _typical(deviation, kinds), _OUTLIER_FLOOR)


def _typical(values: Floats, kinds: _Kinds) -> Floats:
    """The median of each one's kind, (n,); where there are too few of the kind, that of all decode or all prefill."""
    names, medians, counts = _medians(values, kinds)
    index = np.searchsorted(names, kinds)
    typical: Floats = medians[index]
    few = counts[index] < ENOUGH_ALIKE
    for family in (kinds >= 0, kinds < 0):
        if np.any(few & family):
            typical[few & family] = np.median(values[family])
    return typical


def _medians(values: Floats, kinds: _Kinds) -> tuple[_Kinds, Floats, _Kinds]:
    """The kinds in rising order, the median of each one's values, and their number."""
    ordered = values[np.lexsort((values, kinds))]
    names, counts = np.unique(kinds, return_counts=True)
    first = np.cumsum(counts) - counts
    return names, (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2, counts


def _sizes_off(fitted: Floats, measured: Floats, kinds: _Kinds, floor: float) -> _Kinds:
    """Batch sizes that need a price of their own: all that have enough steps of pure decode, if the line misses any of
    them by more than chance; else none."""
    decode = kinds > 0
    if not np.any(decode):
        return kinds[:0]
    ratio, kinds = measured[decode] / np.maximum(fitted[decode], floor), kinds[decode]
    sizes, medians, counts = _medians(ratio, kinds)
    spread = np.median(np.abs(ratio / np.maximum(medians[np.searchsorted(sizes, kinds)], 1e-9) - 1))
    # Of normal noise: its deviation from the MAD, and the standard error of a median from that.
    error = 1.4826 * 1.2533 * spread / np.sqrt(counts)
    enough = counts >= ENOUGH_ALIKE
    off = enough & (np.abs(medians - 1) > np.maximum(_MISFIT, _MISFIT_ERRORS * error))
    return sizes[enough] if np.any(off) else sizes[:0]


def _with_corrections(
    line: Floats, design: Floats, measured: Floats, kinds: _Kinds, sizes: _Kinds, floor: float
) -> tuple[Floats, tuple[tuple[int, float], ...]]:
    """A better line (4,) and the corrections at these batch sizes.

    Corrections make decode of these sizes right on average, whatever the line. So a step that samples rows tells of the
    line only how it differs from decode of as many rows: all are taken less that, which leaves the base to steps that
    sample nothing, and the price of a row to nobody. Beyond the largest size a row costs what it does on average up to
    there. Without any prefill there is nothing to be learned about the line, and it stays.
    """
    place = np.searchsorted(sizes, kinds)
    place[~np.isin(kinds, sizes)] = len(sizes)
    counts = np.bincount(place)[: len(sizes)]
    columns = np.column_stack([design, measured])
    means = np.column_stack([np.bincount(place, column)[: len(sizes)] / counts for column in columns.T])
    if np.any(kinds < 0):
        rows = design[:, _ROWS]
        like = np.column_stack([np.interp(rows, sizes, column) for column in means.T]) * (rows >= 1)[:, None]
        weight = 1 / np.maximum(measured, floor)
        line = non_negative(
            design - like[:, :4], measured - like[:, 4], weight, negligible=_SIGNIFICANT / len(measured)
        )
        if len(sizes) > 1:
            above = means[:, 4] - means[:, :4] @ line
            line[_ROWS] = max(0.0, float(above[-1] - above[0]) / float(sizes[-1] - sizes[0]))
    corrections = means[:, 4] - means[:, :4] @ line
    return line, tuple(zip(sizes.tolist(), corrections.tolist(), strict=True))
