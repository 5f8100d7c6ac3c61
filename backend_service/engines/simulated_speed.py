"""How fast the simulated engine pretends to be: a table of decode steps, or any step model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from backend_service.step_model import IsolatedRates
from service_kit.faults import StartupFailed
from service_kit.step_time import StepModel, StepShape

_SAMPLE_CONTEXTS = (0, 256, 1024, 4096)


class Speed(Protocol):
    """How fast to pretend to be."""

    def rates(self) -> IsolatedRates:
        """One request alone, as reported."""

    def seconds(self, prefill_tokens: int, shape: StepShape) -> float:
        """Of one step. `shape` covers all of it; `prefill_tokens` of its tokens are of prompts."""

    def samples(self, max_active: int, step_tokens: int) -> list[tuple[StepShape, float]]:
        """Exact steps of all kinds, with up to so many rows and tokens: enough for a step model to be fitted to."""


@dataclass(frozen=True, slots=True)
class SimulatedSpeed:
    """Prefill at one rate, and decode steps by batch size, whatever the contexts."""

    prefill_tokens_per_s: float
    decode_step_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of one decode step by batch size; linear in between, the outer segments extended."""
    reported_decode_tokens_per_s: float | None = None
    """The isolated rate that Status shows, where it is to differ from the true 1 / step_s(1)."""

    def rates(self) -> IsolatedRates:
        """See `Speed`."""
        return IsolatedRates(self.prefill_tokens_per_s, self.reported_decode_tokens_per_s or 1.0 / self.step_s(1))

    def seconds(self, prefill_tokens: int, shape: StepShape) -> float:
        """The prompts' tokens at their rate, plus one decode step of the other rows."""
        return prefill_tokens / self.prefill_tokens_per_s + self.step_s(shape.tokens - prefill_tokens)

    def samples(self, max_active: int, step_tokens: int) -> list[tuple[StepShape, float]]:
        """See `Speed`."""
        return [(shape, self.seconds(prefill, shape)) for prefill, shape in _sample_shapes(max_active, step_tokens)]

    def step_s(self, rows: int) -> float:
        """Seconds of a decode step with this many rows."""
        if rows == 0:
            return 0.0
        exact = self.decode_step_s.get(rows)
        if exact is not None:
            return exact
        sizes = sorted(self.decode_step_s)
        if len(sizes) == 1:
            return self.decode_step_s[sizes[0]]
        right = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        slope = (self.decode_step_s[high] - self.decode_step_s[low]) / (high - low)
        return max(0.0, self.decode_step_s[low] + slope * (rows - low))


@dataclass(frozen=True, slots=True)
class ModelSpeed:
    """Exactly what a step model says."""

    model: StepModel
    isolated: IsolatedRates
    """As reported."""

    def rates(self) -> IsolatedRates:
        """See `Speed`."""
        return self.isolated

    def seconds(self, prefill_tokens: int, shape: StepShape) -> float:
        """See `Speed`."""
        return self.model.seconds(shape)

    def samples(self, max_active: int, step_tokens: int) -> list[tuple[StepShape, float]]:
        """See `Speed`."""
        return [(shape, self.seconds(prefill, shape)) for prefill, shape in _sample_shapes(max_active, step_tokens)]


def _sample_shapes(max_active: int, step_tokens: int) -> Iterator[tuple[int, StepShape]]:
    """(prompt tokens among them, shape): chunks of a prompt alone and beside decode rows, then decode at every batch
    size up to a few and at powers of two; all of it at several contexts."""
    few = (*range(1, 9), *(1 << bit for bit in range(4, 10)), max_active)
    batches = sorted({min(max_active, rows) for rows in few})
    chunks = sorted({max(2, step_tokens // part) for part in (1, 2, 4, 8)})
    for context in _SAMPLE_CONTEXTS:
        for chunk in chunks:
            yield chunk, StepShape.of([(chunk, context, 0)])
        for rows in batches:
            decode = [(1, context, 1)] * rows
            yield 0, StepShape.of(decode)
            yield chunks[0], StepShape.of([*decode, (chunks[0], context, 0)])


def parse_decode_steps(text: str) -> dict[int, float]:
    """`"1:3.4,4:43"` (batch size : milliseconds) -> seconds by batch size. Raises `StartupFailed`."""
    try:
        steps = {int(size): float(ms) / 1000 for size, ms in (pair.split(":") for pair in text.split(","))}
    except ValueError:
        steps = {}
    if not steps or min(steps) < 1 or min(steps.values()) <= 0:
        raise StartupFailed(
            f'--simulated-decode-ms "{text}" is not a list of batch:milliseconds pairs; write it like "1:3.4,4:43".'
        )
    return steps
