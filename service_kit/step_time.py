"""How long an engine step takes and how much prefill goes into it: the rules that a backend runs by and that a router
forecasts with. No engine, no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST_PREFILL_SHARE = 0.5
"""Of a step's target time, for prompts in any case."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step computes; the sums run over its batch."""

    tokens: int
    """T: new tokens, of prefill and decode alike."""
    rows: int
    """D: rows that get a token sampled."""
    attended: float
    """A: context lengths summed over the computed tokens."""

    @classmethod
    def of(cls, slices: Iterable[tuple[int, int, int]]) -> StepShape:
        """From (new tokens, tokens computed before them, rows sampled) of each slice of the batch: token i of n new
        ones after c attends to c + i, so a slice adds n * (c + (n + 1) / 2)."""
        tokens = rows = 0
        attended = 0.0
        for new, computed, sampled in slices:
            tokens += new
            rows += sampled
            attended += new * (computed + (new + 1) / 2)
        return cls(tokens, rows, attended)


@dataclass(frozen=True, slots=True)
class StepModel:
    """t = base + per_token * T + per_row * D + per_attended * A + correction(D); no coefficient is negative.

    The corrections are for engines whose step does not grow in proportion to the batch.
    """

    base_s: float
    per_token_s: float
    per_row_s: float
    per_attended_s: float
    samples: int
    residual_p90_s: float
    """90th percentile of |measured - fitted| over the samples, outliers included."""
    row_corrections_s: tuple[tuple[int, float], ...] = ()
    """(D, seconds to add at that D), rising in D; linear in between, the first and the last beyond them."""

    def seconds(self, shape: StepShape) -> float:
        """The expected duration of a step; never negative."""
        return max(
            0.0,
            self.base_s
            + self.per_token_s * shape.tokens
            + self.per_row_s * shape.rows
            + self.per_attended_s * shape.attended
            + self.correction_s(shape.rows),
        )

    def correction_s(self, rows: int) -> float:
        """What steps that sample so many rows take beyond the linear part; 0 for none."""
        knots = self.row_corrections_s
        if not knots or rows < 1:
            return 0.0
        right = bisect_left(knots, (rows,))
        if right == 0:
            return knots[0][1]
        if right == len(knots):
            return knots[-1][1]
        (low, low_s), (high, high_s) = knots[right - 1], knots[right]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)


def prefill_budget(model: StepModel, room_tokens: int, target_s: float, decode_s: float, mean_context: float) -> int:
    """Prompt tokens for a step beside its decode rows: `room_tokens`, and what the time allows; 1 at least.

    `decode_s` is what the step would take without prompts. A prompt token costs more the longer the context before it,
    so the budget shrinks as a long prompt proceeds; `mean_context` is over the requests in prefill. Prompts have at
    least half of the target time, however long the decode rows take: else a large batch would starve them.
    """
    token_s = model.per_token_s + model.per_attended_s * mean_context
    if token_s > 0:
        left_s = max(target_s - decode_s, LEAST_PREFILL_SHARE * target_s)
        room_tokens = min(room_tokens, int(left_s / token_s))
    return max(1, room_tokens)


def fair_shares(wanted: Sequence[int], budget: int) -> list[int]:
    """Split `budget` tokens over requests that want `wanted` each: equal shares, and what one does not need goes to
    the others; a remainder goes to the earlier ones."""
    shares = [0] * len(wanted)
    open_ = [index for index, want in enumerate(wanted) if want > 0]
    while open_ and budget > 0:
        open_.sort(key=shares.__getitem__)  # a remainder goes to who has least
        each, extra = divmod(budget, len(open_))
        for position, index in enumerate(open_):
            give = min(each + (position < extra), wanted[index] - shares[index])
            shares[index] += give
            budget -= give
        open_ = [index for index in open_ if shares[index] < wanted[index]]
    return shares
