"""What one step computes: a token for every decoding request, then prompts, within the time that a step may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend_service.engines.base import Slice
from backend_service.request import Phase, Request
from backend_service.step_model import StepModel, StepShape

_LEAST_PREFILL_SHARE = 0.5
"""Of the target time, for prompts in any case."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of a step."""

    step_tokens: int = 256
    """Tokens computed in one step, decode rows included."""
    step_target_s: float | None = None
    """How long a step with prefill in it may take, by the fitted step model: the bound on how long a cancel waits and
    how long a prompt stalls the streams beside it. Prompts have at least half of it, however long the decode rows
    take: else a large batch would starve them. It only ever lowers `step_tokens`. None: no such bound."""
    guesses: int = 0
    """Guessed tokens to verify for each decoding request (speculative decoding)."""


class StepPlanner:
    """Composes steps so that a long prompt never stalls the streams beside it for more than one budget."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._rotation = 0

    def plan(self, active: Sequence[Request], model: StepModel | None) -> list[Slice]:
        """The next step: all decode rows, then fair shares of the budget for the prompts, starting at another one
        each time. Empty when nothing is active."""
        decoding = [request for request in active if request.phase is Phase.DECODE]
        prefilling = [request for request in active if request.phase is Phase.PREFILL]
        room = self._limits.step_tokens - len(prefilling)  # each prompt can proceed by a token at least
        slices = [Slice(request.handle, 1, self._guesses(request, room // len(decoding))) for request in decoding]
        if prefilling:
            self._rotation += 1
            first = self._rotation % len(prefilling)
            prefilling = prefilling[first:] + prefilling[:first]
            budget = self._prefill_budget(decoding, prefilling, slices, model)
            shares = fair_shares([request.pending_tokens for request in prefilling], budget)
            slices += [Slice(request.handle, share) for request, share in zip(prefilling, shares, strict=True) if share]
        return slices

    def _guesses(self, request: Request, rows: int) -> int:
        """Never so many that the last one would lie beyond the request's end, or beyond its part of the step, which
        is this many rows."""
        return max(0, min(self._limits.guesses, request.remaining_decode_tokens - 1, rows - 1))

    def _prefill_budget(
        self,
        decoding: Sequence[Request],
        prefilling: Sequence[Request],
        decode_slices: Sequence[Slice],
        model: StepModel | None,
    ) -> int:
        """Prompt tokens for this step: what `step_tokens` leaves, and what the time allows. A prompt token costs more
        the longer the context before it, so the budget shrinks as a long prompt proceeds."""
        rows = sum(1 + piece.guesses for piece in decode_slices)
        budget = self._limits.step_tokens - rows
        target_s = self._limits.step_target_s
        if model is not None and target_s is not None:
            spent_s = model.seconds(
                StepShape.of(
                    (1 + piece.guesses, request.computed_tokens, True)
                    for piece, request in zip(decode_slices, decoding, strict=True)
                )
            )
            context = sum(request.computed_tokens for request in prefilling) / len(prefilling)
            token_s = model.per_token_s + model.per_attended_s * context
            if token_s > 0:
                left_s = max(target_s - spent_s, _LEAST_PREFILL_SHARE * target_s)
                budget = min(budget, int(left_s / token_s))
        return max(1, budget)


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
