"""What one step computes: a token for every decoding request, then prompts, within the time that a step may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend_service.engines.base import Slice
from backend_service.request import Phase, Request
from service_kit.step_time import StepModel, StepShape, fair_shares, prefill_budget


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
        """See `service_kit.step_time.prefill_budget`."""
        room = self._limits.step_tokens - sum(1 + piece.guesses for piece in decode_slices)
        target_s = self._limits.step_target_s
        if model is None or target_s is None:
            return max(1, room)
        decode = StepShape.of(
            (1 + piece.guesses, request.computed_tokens, 1 + piece.guesses)
            for piece, request in zip(decode_slices, decoding, strict=True)
        )
        context = sum(request.computed_tokens for request in prefilling) / len(prefilling)
        return prefill_budget(model, room, target_s, model.seconds(decode), context)
