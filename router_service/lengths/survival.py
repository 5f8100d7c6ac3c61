"""How likely an answer is to become longer than t tokens, learnt from some that ended and some that were cut off."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Survival:
    """S(t) = P(longer than t), a step function, ready for look-ups in O(log n)."""

    times: list[int]
    """Lengths in tokens, rising, between which S does not fall; 0 comes first."""
    chances: list[float]
    """S from each time on, up to the next; above 0. After the last it stays: who comes so far goes on to the budget."""
    areas: list[float]
    """Sum of S(t) over t below each time."""

    def remaining(self, generated: int, budget: int) -> float:
        """Tokens to come of an answer that has made `generated` and may become `budget` > `generated` in all:

            sum of S(t) / S(generated) over t from generated to budget - 1

        which lies between 1 and budget - generated. It is the latter once the answer is longer than all known ones.
        """
        times, chances, areas = self.times, self.chances, self.areas
        left = float(budget - generated)
        if generated >= times[-1]:
            return left
        here = bisect_right(times, generated) - 1
        there = bisect_right(times, budget) - 1
        chance = chances[here]
        until_budget = areas[there] + chances[there] * (budget - times[there])
        until_now = areas[here] + chance * (generated - times[here])
        tokens = (until_budget - until_now) / chance
        # Rounding may leave the bounds by a hair. No min() and max(): this runs for every request that waits anywhere.
        if tokens < 1.0:
            return 1.0
        return tokens if tokens < left else left

    def updated(self, lengths: NDArray[np.int64], ended: NDArray[np.bool_], weight: float) -> Survival:
        """What this becomes in the light of answers: of each its length in tokens (1 at least), and whether it ended
        there or was cut off. This counts as `weight` > 0 answers more, distributed as it says.

        The Kaplan-Meier (product-limit) estimator with this as a Dirichlet prior (Susarla and Van Ryzin
        1976): where d answers end at t, and n are at least so long (cut off there included),

            S'(t) / S'(t - 1) = (n - d + weight * S(t)) / (n + weight * S(t - 1))

        Without answers S' is S. If none was cut off, S'(t) = (answers longer than t + weight * S(t)) / (answers +
        weight).
        """
        times = np.array(self.times)
        at = np.concatenate((times, lengths))
        at.sort()
        at = at[np.concatenate(([True], at[1:] != at[:-1]))]
        # From here on one figure for each time in `at`; the first is 0, by which no answer has ended.
        prior = weight * np.array(self.chances)[times.searchsorted(at, "right") - 1]
        at_least = len(lengths) - np.sort(lengths).searchsorted(at)
        ended_by = np.sort(lengths[ended]).searchsorted(at, "right")
        passing = at_least[1:] - (ended_by[1:] - ended_by[:-1]) + prior[1:]
        coming = at_least[1:] + prior[:-1]
        chances = np.concatenate(([1.0], (passing / coming).cumprod()))
        areas = np.concatenate(([0.0], (chances[:-1] * (at[1:] - at[:-1])).cumsum()))
        return Survival(at.tolist(), chances.tolist(), areas.tolist())


TO_THE_BUDGET = Survival([0], [1.0], [0.0])
"""Nothing known: no answer ends before its budget."""
