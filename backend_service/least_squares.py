"""Non-negative least squares in four unknowns, exact, and in favour of few of them."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DEPENDENT = 1e-7
"""Columns (of unit length) whose smallest singular value is below this share of the largest are dependent."""
_PREFERENCE = (1, 0, 2, 3)
"""Of as many columns, the support that comes first in this order is taken."""
_SUPPORTS = np.zeros((16, 4))
"""Subsets of the columns in order of preference, 1 for a member; the empty one first."""
for _place, _support in enumerate(chain.from_iterable(combinations(_PREFERENCE, size) for size in range(5))):
    _SUPPORTS[_place, list(_support)] = 1.0
_SIZES = _SUPPORTS.sum(axis=1)


def non_negative(design: Floats, target: Floats, weight: Floats, *, negligible: float) -> Floats:
    """argmin |weight * (design @ c - target)| over c >= 0, for design (n, 4) and target (n,).

    The optimum is the unconstrained optimum on its own support, and by Caratheodory some support with independent
    columns attains it; so trying all of those is exact. Supports whose squared error exceeds the least by no more
    than the share `negligible` count as equal to it, and the smallest of them wins.
    """
    columns = design * weight[:, None]
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    # One QR brings n rows down to 5 with the same errors, without squaring the condition number as X'X would.
    reduced: Floats = np.linalg.qr(np.column_stack([columns / scale, target * weight])).R
    left, right = reduced[:, :4], reduced[:, 4]
    # Columns outside a support are zero: they have no singular value, and get no coefficient.
    bases, singular, turns = np.linalg.svd(left * _SUPPORTS[:, None, :], full_matrices=False)
    real = singular > DEPENDENT * singular[:, :1]
    seen = np.einsum("kni,n->ki", bases, right) / np.where(real, singular, np.inf)
    solutions = np.einsum("kij,ki->kj", turns, seen) * _SUPPORTS
    errors = np.sum((right - solutions @ left.T) ** 2, axis=1)
    fit = (np.count_nonzero(real, axis=1) == _SIZES) & np.all(solutions >= 0, axis=1)
    limit = np.min(errors[fit]) * (1 + negligible) + 1e-18 * float(right @ right)
    best: Floats = solutions[np.argmax(fit & (errors <= limit))] / scale
    return best
