"""The batch size that a backend should run: as much throughput as there is to be had at a bearable pace."""

from __future__ import annotations

from dataclasses import dataclass

from service_kit.step_time import StepModel, StepShape

START = 4
"""Batch size while no step model says better."""
DEFAULT_TARGET_S = 0.1
DEFAULT_TARGET_STEPS = 2.0
"""Without a target of its own, a decode step may take the larger of `DEFAULT_TARGET_S` and so many steps alone."""
NEAR_BEST = 0.95
"""A batch with this share of the best throughput is as good: every row less is a shorter step for the others."""
MIN_GAIN = 1.1
"""A change must bring this much throughput, or mend a target that is missed by as much."""
MIN_INTERVAL_S = 2.0
START_CONTEXT_TOKENS = 256.0
"""Context of a request where none was seen yet."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A batch size and how it came about."""

    max_active: int
    reason: str
    """One sentence for people."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Decode at a batch size: seconds between two tokens of a stream, and tokens/s of all streams together."""

    rows: int
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.rows / self.step_s


def paces(model: StepModel, context_tokens: float, largest: int) -> list[Pace]:
    """Of the batches 1 .. `largest`, of requests that have `context_tokens` each."""
    return [
        Pace(rows, max(model.seconds(StepShape(rows, rows, rows * (context_tokens + 1))), 1e-9))
        for rows in range(1, largest + 1)
    ]


def best_pace(options: list[Pace], target_s: float) -> Pace:
    """Of the batches with a decode step within the target the smallest that comes near the best of them in throughput;
    where none is within it, one request alone. `options` as from `paces`."""
    within = [pace for pace in options if pace.step_s <= target_s] or options[:1]
    best = max(pace.tokens_per_s for pace in within)
    return next(pace for pace in within if pace.tokens_per_s >= NEAR_BEST * best)


class Concurrency:
    """Chooses, and sticks to it until a change is worth it: a choice that flickers with the noise of the model would
    make every forecast of the queue wrong. One thread."""

    def __init__(self, largest: int, target_s: float | None = None) -> None:
        """`target_s`: longest decode step, which is the time between two tokens of a stream; None: 100 ms, or twice
        what a step alone takes where that is more. Raises `ValueError` below 1 or for a target that is not above 0."""
        if largest < 1:
            raise ValueError(f"a largest batch of {largest} is none; give 1 or more")
        if target_s is not None and not target_s > 0:
            raise ValueError(f"a target of {target_s} s between two tokens cannot be met; give more than 0")
        self._largest = largest
        self._target_s = target_s
        self._changed_s: float | None = None
        start = min(START, largest)
        self._choice = Choice(start, f"auto: {start} of at most {largest}, until enough steps were measured")

    @property
    def choice(self) -> Choice:
        """The latest."""
        return self._choice

    def update(self, model: StepModel | None, context_tokens: float, now_s: float) -> Choice:
        """Choose by a new model. `context_tokens`: what requests have in the KV cache, on average; `now_s` on any clock
        that never goes back."""
        if model is None:
            return self._choice
        options = paces(model, context_tokens, self._largest)
        if self._target_s is None:
            target_s = max(DEFAULT_TARGET_S, DEFAULT_TARGET_STEPS * options[0].step_s)
        else:
            target_s = self._target_s
        current, best = options[self._choice.max_active - 1], best_pace(options, target_s)
        if best.rows != current.rows and self._worth_it(current, best, target_s, now_s):
            self._changed_s = now_s
            current = best
        elif self._changed_s is None:
            self._changed_s = now_s
        self._choice = Choice(current.rows, _reason(current, options))
        return self._choice

    def _worth_it(self, current: Pace, best: Pace, target_s: float, now_s: float) -> bool:
        if self._changed_s is None:  # the first time there is a model: what was there was no choice
            return True
        if now_s - self._changed_s < MIN_INTERVAL_S:
            return False
        misses = current.step_s > MIN_GAIN * target_s
        return misses or best.tokens_per_s >= MIN_GAIN * current.tokens_per_s


def _reason(chosen: Pace, options: list[Pace]) -> str:
    """With twice the batch beside it, or half of it where there is no more."""
    other = options[min(2 * chosen.rows, len(options)) - 1]
    if other.rows == chosen.rows:
        other = options[max(1, chosen.rows // 2) - 1]
    text = (
        f"auto: {chosen.rows} of at most {len(options)}; {chosen.tokens_per_s:.0f} tokens/s at "
        f"{_ms(chosen.step_s)} a step"
    )
    if other.rows == chosen.rows:
        return text
    return f"{text}, {other.rows} would make {other.tokens_per_s:.0f} at {_ms(other.step_s)}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
