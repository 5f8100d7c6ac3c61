"""The steps that a step model is fitted to: some of every kind, all as if measured at the speed of now."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backend_service.least_squares import Floats
from service_kit.step_time import StepShape

ENOUGH_ALIKE = 3
"""A step is familiar if so many earlier ones are like it."""
_ALIKE = 2.0
"""Steps are alike up to this ratio of their tokens and of their attended pairs."""
_ALIKE_CONTEXT = 64
"""Contexts shorter than this hardly differ."""
_RECENT = 32
_JUDGED = 16
_AGREEING = 13
"""So many of the latest `_JUDGED` familiar steps must be off to the same side."""
_BAND = 1.15
"""How much longer or shorter than its likes a step is that is off."""
_WIDE_BAND = 1.35
"""The same where it has no likes among steps that sample as many rows: then the model must bridge the difference."""
_MAX_STRATA = 24

_SHAPE = slice(0, 4)
_TOKENS, _ROWS, _ATTENDED, _SECONDS, _NUMBER = range(1, 6)
_COLUMNS = 6
"""The first is constant. `_NUMBER`: which step it was, counted from 1; 0 for what was given at the start."""

Predict = Callable[[Floats], Floats]
"""Expected seconds (n,) of steps with the columns 1, T, D, A (n, 4)."""


@dataclass(slots=True)
class _Recent:
    row: Floats
    ratio: float | None
    """Its duration to that of its likes; None: not familiar."""
    band: float
    compared_to: int
    """The newest of them."""

    def off(self) -> int:
        """1 for slower than its likes, -1 for faster, 0 for neither."""
        if self.ratio is None or 1 / self.band <= self.ratio <= self.band:
            return 0
        return 1 if self.ratio > 1 else -1


class StepSamples:
    """Keeps the latest steps with prefill (T > D) in one window, and those of pure decode in one for each number of
    rows: what one kind of step costs is not forgotten while another one runs.

    When the machine gets slower or faster all at once, what was measured before is scaled to the new speed, so that the
    kinds of steps that did not run since are priced right too. A change of speed is told from a change of load by
    comparing each step with earlier ones like it: 13 of 16 must take longer, or shorter, than `_BAND` allows. A step
    without its likes says nothing. Nor is it known at which speed those ran that came after the last of the likes: they
    stay as they were measured, and follow when their own kind runs again. (To scale them too makes two kinds that take
    turns undo each other's scale for ever.)

    Each such change of scale is a little off, and a kind that does not run for long has seen many of them. So decode of
    a size that is not among the latest steps is priced by the calibration: as it was to a size that is among them.
    """

    def __init__(self, *, prefill_window: int, decode_window: int, decode_limit: int) -> None:
        """Steps to keep with prefill, and of pure decode for each number of rows; the fewer of those last the more
        numbers there are, so that all together they stay within `decode_limit` or close to it."""
        self._prefill = _Ring(prefill_window)
        self._decode_window = decode_window
        self._decode_limit = decode_limit
        self._decode: dict[int, _Ring] = {}
        self._seeds: dict[int, Floats] = {}
        """The calibration's decode by rows, as it was measured."""
        self._recent: deque[_Recent] = deque()
        """Not among the samples that others are compared with: else a new speed would soon look like the old one."""
        self._number = 0

    def seed(self, shape: StepShape, seconds: float) -> None:
        """A step that was measured before this began."""
        row = _row(shape, seconds, 0)
        self._keep(row)
        if shape.tokens == shape.rows:
            known = self._seeds.get(shape.rows)
            self._seeds[shape.rows] = row[None] if known is None else np.concatenate([known, row[None]])

    def add(self, shape: StepShape, seconds: float, predict: Predict | None) -> None:
        """A step that just ended. `predict`: where there is a model; nothing is compared without."""
        self._number += 1
        row = _row(shape, seconds, self._number)
        recent = _Recent(row, None, _BAND, 0)
        likes = self._likes(row) if predict else None
        if predict and likes is None:
            likes, recent.band = self._distant_likes(row), _WIDE_BAND
        if predict and likes is not None:
            *expected, own = predict(np.concatenate([likes, row[None]])[:, _SHAPE])
            usual = sorted(likes[:, _SECONDS] / np.maximum(expected, 1e-9))[len(likes) // 2] * own
            recent.ratio = seconds / max(float(usual), 1e-9)
            recent.compared_to = int(likes[:, _NUMBER].max())
        self._recent.append(recent)
        if len(self._recent) > _RECENT:
            self._keep(self._recent.popleft().row)
        if recent.off():
            self._follow_speed()

    def table(self, predict: Predict | None = None) -> tuple[Floats, NDArray[np.int64]]:
        """Columns 1, T, D, A, seconds (n, 5), and each step's kind (n,): D for pure decode, -1 - D with prefill.
        `predict`: of the last model, where there is one."""
        if predict:
            self._anchor(predict)
        each = max(2 * ENOUGH_ALIKE, self._decode_limit // max(1, len(self._decode)))
        kept = [self._prefill.rows, *(ring.latest(each) for ring in self._decode.values())]
        recent = [recent.row for recent in self._recent]
        steps = np.concatenate([*kept, np.array(recent).reshape(-1, _COLUMNS)])
        rows = steps[:, _ROWS].astype(np.int64)
        kinds = np.where(steps[:, _TOKENS] > rows, -1 - rows, rows)
        return steps[:, : _SECONDS + 1], kinds

    def _keep(self, row: Floats) -> None:
        self._ring(row).put(row)

    def _ring(self, row: Floats) -> _Ring:
        """The window for steps like this; moves it to the end of those of decode, whose first one gives way."""
        if row[_TOKENS] > row[_ROWS]:
            return self._prefill
        rows = int(row[_ROWS])
        ring = self._decode.pop(rows, None) or _Ring(self._decode_window)
        self._decode[rows] = ring
        if len(self._decode) > _MAX_STRATA:
            del self._decode[next(iter(self._decode))]
        return ring

    def _likes(self, row: Floats) -> Floats | None:
        """Earlier steps of its kind like this one; None for too few."""
        if row[_TOKENS] > row[_ROWS]:
            rows = self._prefill.rows
        elif ring := self._decode.get(int(row[_ROWS])):
            rows = ring.rows
        else:
            return None
        return _alike(rows[rows[:, _ROWS] == row[_ROWS]], row)

    def _distant_likes(self, row: Floats) -> Floats | None:
        """Earlier steps that compute about as much and sample other numbers of rows, all of these numbers, its own too,
        within those whose decode is known; None for too few. When the speed changes, so do the chunks of the prompts,
        and their sizes are new then."""
        if not self._decode or not 1 <= row[_ROWS] <= (most := max(self._decode)):
            return None
        size = row[_TOKENS]
        rings = [ring.rows for rows, ring in self._decode.items() if size <= _ALIKE * rows and rows <= _ALIKE * size]
        rows = np.concatenate([self._prefill.rows, *rings])
        return _alike(rows[(rows[:, _ROWS] >= 1) & (rows[:, _ROWS] <= most)], row)

    def _follow_speed(self) -> None:
        """Scale what was measured before a change of speed, if there was one."""
        judged = [recent for recent in self._recent if recent.ratio is not None][-_JUDGED:]
        off = max(([recent for recent in judged if recent.off() == side] for side in (1, -1)), key=len)
        if len(off) < _AGREEING:
            return
        factor = float(np.median([recent.ratio for recent in off if recent.ratio is not None]))
        began, until = off[0].row[_NUMBER], max(recent.compared_to for recent in off)
        for rows in (self._prefill.rows, *(ring.rows for ring in self._decode.values())):
            rows[rows[:, _NUMBER] <= until, _SECONDS] *= factor
        for recent in self._recent:
            if recent.row[_NUMBER] < began and recent.row[_NUMBER] <= until:
                recent.row[_SECONDS] *= factor
            recent.ratio = None  # it has spoken

    def _anchor(self, predict: Predict) -> None:
        """Price decode of each size that did not run lately as the calibration had it beside the nearest size that did,
        on a line between the sizes that were calibrated. `predict` bridges different contexts only, always of equal
        rows: between sizes it may be off."""
        recent = [each.row for each in self._recent if each.row[_TOKENS] == each.row[_ROWS]]
        known = sorted(rows for rows, steps in self._seeds.items() if len(steps) >= ENOUGH_ALIKE)
        if not known or not recent:
            return
        latest = np.array(recent)
        context = float(np.median(latest[:, _ATTENDED] / latest[:, _ROWS]))
        calibrated_s = [_typical_s(self._seeds[rows], context, predict) for rows in known]
        ran = {int(rows): latest[latest[:, _ROWS] == rows][-_JUDGED:] for rows in np.unique(latest[:, _ROWS])}
        slower = {
            rows: _typical_s(steps, context, predict) / float(np.interp(rows, known, calibrated_s))
            for rows, steps in ran.items()
            if known[0] <= rows <= known[-1] and len(steps) >= ENOUGH_ALIKE
        }
        if not slower:
            return
        for rows, ring in self._decode.items():
            if rows not in ran and known[0] <= rows <= known[-1]:
                nearest = min(slower, key=lambda size: (abs(size - rows), size))
                now_s = slower[nearest] * float(np.interp(rows, known, calibrated_s))
                ring.rows[:, _SECONDS] *= now_s / _typical_s(ring.rows, context, predict)


class _Ring:
    """The last `size` rows put in, in no particular order."""

    def __init__(self, size: int) -> None:
        self._rows: Floats = np.zeros((size, _COLUMNS))
        self._count = 0

    def latest(self, most: int) -> Floats:
        """So many of the rows that were put in last."""
        kept = self.rows
        if len(kept) <= most:
            return kept
        return kept[np.arange(self._count - most, self._count) % len(kept)]

    def put(self, row: Floats) -> None:
        self._rows[self._count % len(self._rows)] = row
        self._count += 1

    @property
    def rows(self) -> Floats:
        """A view: changes are kept."""
        return self._rows[: self._count]


def _row(shape: StepShape, seconds: float, number: int) -> Floats:
    return np.array([1.0, shape.tokens, shape.rows, shape.attended, seconds, number])


def _typical_s(rows: Floats, context: float, predict: Predict) -> float:
    """The median of decode steps of equal rows, as if each had had contexts of this length."""
    there = rows[:, _SHAPE].copy()
    there[:, _ATTENDED] = context * there[:, _ROWS]
    seconds = rows[:, _SECONDS] * predict(there) / np.maximum(predict(rows[:, _SHAPE]), 1e-9)
    return max(float(np.median(seconds)), 1e-9)


def _alike(rows: Floats, row: Floats) -> Floats | None:
    """Those that compute about as many tokens over about as long contexts; None for too few."""
    reach = row[_ATTENDED] + row[_TOKENS] * _ALIKE_CONTEXT
    reaches = rows[:, _ATTENDED] + rows[:, _TOKENS] * _ALIKE_CONTEXT
    likes: Floats = rows[_within(rows[:, _TOKENS], row[_TOKENS]) & _within(reaches, reach)]
    return likes if len(likes) >= ENOUGH_ALIKE else None


def _within(values: Floats, value: float) -> NDArray[np.bool_]:
    return (values <= _ALIKE * value) & (value <= _ALIKE * values)
