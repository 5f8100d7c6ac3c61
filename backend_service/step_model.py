"""How long an engine step takes, learned from the steps that ran."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from service_kit.step_time import StepModel, StepShape

MIN_SAMPLES = 16
"""Fewer steps give no model."""
_OUTLIER_MADS = 5.0
_OUTLIER_FLOOR = 0.05
"""Relative residuals closer to their median than this are never outliers, however quiet the rest is."""
_SIGNIFICANT = 9.0
"""A coefficient is taken for noise when leaving it out adds less than this many times the mean squared error to the
summed one: three standard errors, squared."""
_DEPENDENT = 1e-7
"""Columns (of unit length) whose smallest singular value is below this share of the largest are dependent."""
_WEIGHT_FLOOR = 0.01
"""No step weighs more than one of this share of the median duration."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class IsolatedRates:
    """Speeds of one request alone."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class StepFit:
    """Fits a `StepModel` to the latest steps. One thread.

    Half of the window is kept for steps with prefill (T > D) and half for pure decode: in pure decode T = D, so a
    window of nothing else cannot tell a prefill token's cost from a sampled row's.

    The fit minimises relative errors. Noise grows with the duration, and a forecast adds up many short steps; absolute
    errors would let a few long prefill steps set the price of decode. It is exact non-negative least squares, twice:
    the first fit weighs by measured time, under which a stalled step counts little, and finds the outliers; the
    second weighs by fitted time, which is free of bias.

    Where the window cannot tell (steps alike, proportional columns, differences below noise), several models explain it
    equally well. Then the one with the fewest coefficients is taken, and among those the first of per_token, base,
    per_row, per_attended: steps all alike give per_token alone. That overprices prefill, which is safer for a router
    than prefill that looks free, and lasts until the first step of another shape.
    """

    def __init__(self, window: int = 512) -> None:
        if window < 2 * MIN_SAMPLES:
            raise ValueError(f"a window of {window} steps is too short to fit; use {2 * MIN_SAMPLES} or more")
        self._prefill = _Ring(window // 2)
        self._decode = _Ring(window // 2)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Record a finished step. O(1). Raises `ValueError` unless `seconds` is finite and not negative."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a step cannot have taken {seconds} s; measure it with a monotonic clock")
        ring = self._prefill if shape.tokens > shape.rows else self._decode
        ring.put((1.0, shape.tokens, shape.rows, shape.attended, seconds))

    def fit(self) -> StepModel | None:
        """The model of the steps in the window; None below `MIN_SAMPLES` of them."""
        kinds = [self._prefill.rows, self._decode.rows]
        steps = np.concatenate(kinds)
        if len(steps) < MIN_SAMPLES:
            return None
        design, measured = steps[:, :4], steps[:, 4]
        floor = max(_WEIGHT_FLOOR * float(np.median(measured)), 1e-9)
        first = _non_negative(design, measured, 1 / np.maximum(measured, floor), negligible=0.0)
        fitted = np.maximum(design @ first, floor)
        relative = (measured - fitted) / fitted
        # Each kind of step has noise of its own: judged together, the few of one kind would be the outliers.
        split = len(kinds[0])
        kept = np.concatenate([_inliers(relative[:split]), _inliers(relative[split:])])
        second = _non_negative(
            design[kept], measured[kept], 1 / fitted[kept], negligible=_SIGNIFICANT / np.count_nonzero(kept)
        )
        base_s, per_token_s, per_row_s, per_attended_s = map(float, second)
        return StepModel(
            base_s=base_s,
            per_token_s=per_token_s,
            per_row_s=per_row_s,
            per_attended_s=per_attended_s,
            samples=len(steps),
            residual_p90_s=float(np.percentile(np.abs(measured - design @ second), 90)),
        )


class _Ring:
    """The last `size` rows put in, in no particular order."""

    def __init__(self, size: int) -> None:
        self._rows: _Floats = np.zeros((size, 5))
        self._count = 0

    def put(self, row: tuple[float, ...]) -> None:
        self._rows[self._count % len(self._rows)] = row
        self._count += 1

    @property
    def rows(self) -> _Floats:
        return self._rows[: self._count]


def _inliers(relative: _Floats) -> NDArray[np.bool_]:
    """Which residuals lie within a few median absolute deviations (MAD) of their median."""
    if len(relative) == 0:
        return np.ones(0, dtype=np.bool_)
    deviation = np.abs(relative - np.median(relative))
    return deviation <= max(_OUTLIER_MADS * float(np.median(deviation)), _OUTLIER_FLOOR)


def _non_negative(design: _Floats, target: _Floats, weight: _Floats, *, negligible: float) -> _Floats:
    """argmin |weight * (design @ c - target)| over c >= 0, for design (n, 4) and target (n,).

    The optimum is the unconstrained optimum on its own support, and by Caratheodory some support with independent
    columns attains it; so trying all of those is exact. Supports whose squared error exceeds the least by no more
    than the share `negligible` count as equal to it, and the first of them wins.
    """
    columns = design * weight[:, None]
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    # One QR brings n rows down to 5 with the same errors, without squaring the condition number as X'X would.
    reduced: _Floats = np.linalg.qr(np.column_stack([columns / scale, target * weight])).R
    left, right = reduced[:, :4], reduced[:, 4]
    candidates: list[tuple[float, _Floats]] = []
    for support in _SUPPORTS:
        solution, _, rank, _ = np.linalg.lstsq(left[:, support], right, rcond=_DEPENDENT)
        if rank == len(support) and np.all(solution >= 0):
            coefficients = np.zeros(4)
            coefficients[list(support)] = solution
            candidates.append((float(np.sum((left @ coefficients - right) ** 2)), coefficients))
    least = min(error for error, _ in candidates)
    limit = least * (1 + negligible) + 1e-18 * float(right @ right)
    best: _Floats = next(coefficients for error, coefficients in candidates if error <= limit) / scale
    return best


_BASE, _TOKENS, _ROWS, _ATTENDED = range(4)
_SUPPORTS = [support for size in range(1, 5) for support in combinations((_TOKENS, _BASE, _ROWS, _ATTENDED), size)]
"""Subsets of the columns in order of preference."""
