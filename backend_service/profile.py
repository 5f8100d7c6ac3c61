"""How fast one request alone is on this engine, measured at start and remembered on disk."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from backend_service.engines.base import Admission, Engine, Slice
from backend_service.step_model import IsolatedRates
from service_kit.faults import StartupFailed
from service_kit.requests import Sampling
from service_kit.step_time import StepShape

STEP_TARGET_S = 0.15
_FIXED_COSTS = 4.0
"""A step with prefill takes at least so many times as long as a decode step of one request. That is about what any step
costs, however little it computes: shorter ones would spend most of their time on it."""
MIN_STEP_TOKENS = 8
_PROBE_CHUNK_TOKENS = 16
_PROBE_DECODE_TOKENS = 3
_PREFILL_TOKENS = 384
_PREFILL_LIMIT_S = 2.0
_TWICE_LIMIT_S = 0.6
_DECODE_TOKENS = 24
_DECODE_LIMIT_S = 1.5
_BATCH_PROMPT_TOKENS = 4
_BATCH_STEPS = 8
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """What a calibration found."""

    rates: IsolatedRates
    step_tokens: int
    """The token budget of a step that takes about `step_target_s`, from an empty context."""
    steps: tuple[tuple[StepShape, float], ...]
    """Every timed step with its seconds: the first samples of the step model."""


class Calibration:
    """Times an idle engine; takes a few seconds on a slow one, less on a fast one."""

    def __init__(self, engine: Engine, *, max_active: int, step_tokens: int = 0, clock: Callable[[], float]) -> None:
        """`step_tokens` 0: found out from the measured prefill rate."""
        self._engine = engine
        self._max_active = max_active
        self._step_tokens = step_tokens
        self._clock = clock
        self._steps: list[tuple[StepShape, float]] = []

    def run(self) -> Profile:
        """Prefill alone, decode alone, then a few steps of the full batch."""
        info = self._engine.info
        tokens = list(_ordinary_tokens(info.vocabulary.size, min(_PREFILL_TOKENS, info.context_tokens // 2)))
        self._prefill_and_release(tokens[:2], 1)  # the first step allocates: not a sample
        self._steps.clear()
        handle, _ = self._prefill(tokens[: 2 * _PROBE_CHUNK_TOKENS], _PROBE_CHUNK_TOKENS)
        rough_rate = _PROBE_CHUNK_TOKENS / self._steps[-1][1]  # of the second chunk: see _prefill_warm
        target_s = step_target_s(self._decode([handle], 2 * _PROBE_CHUNK_TOKENS, _PROBE_DECODE_TOKENS))
        self._engine.release(handle, retain=False)
        step_tokens = self._budget(rough_rate, target_s)
        if step_tokens > 2 * _PROBE_CHUNK_TOKENS and not self._step_tokens:
            # Larger steps are faster ones, where a step's fixed cost is high.
            handle, rough_rate = self._prefill_warm(tokens[1 : 1 + step_tokens], step_tokens)
            self._engine.release(handle, retain=False)
            step_tokens = self._budget(rough_rate, target_s)
        prompt = tokens[: max(2 * _PROBE_CHUNK_TOKENS, int(rough_rate * _PREFILL_LIMIT_S))]
        handle, prefill_rate = self._prefill_warm(prompt, step_tokens)
        decode_rate = self._decode([handle], len(prompt), _DECODE_TOKENS)
        self._engine.release(handle, retain=False)
        if self._max_active > 1:
            self._full_batch(tokens[:_BATCH_PROMPT_TOKENS])
        step_tokens = self._budget(prefill_rate, target_s)
        return Profile(IsolatedRates(prefill_rate, decode_rate), step_tokens, tuple(self._steps))

    def _prefill_warm(self, tokens: list[int], chunk: int) -> tuple[int, float]:
        """As `_prefill`; again, where that took no time to speak of, and then the second time counts: a GPU prepares
        itself for every new shape of a step, which can take ten times as long as the step."""
        samples, begun_s = len(self._steps), self._clock()
        handle, rate = self._prefill(tokens, chunk)
        if self._clock() - begun_s > _TWICE_LIMIT_S:
            return handle, rate
        self._engine.release(handle, retain=False)
        del self._steps[samples:]
        return self._prefill(tokens, chunk)

    def _budget(self, prefill_rate: float, target_s: float) -> int:
        tokens = self._step_tokens or max(MIN_STEP_TOKENS, int(prefill_rate * target_s))
        return min(tokens, self._engine.info.max_step_tokens)

    def _prefill_and_release(self, tokens: list[int], chunk: int) -> float:
        handle, rate = self._prefill(tokens, chunk)
        self._engine.release(handle, retain=False)
        return rate

    def _prefill(self, tokens: list[int], chunk: int) -> tuple[int, float]:
        admission = self._start(tokens)
        begun_s = self._clock()
        for done in range(admission.reused_tokens, len(tokens), chunk):
            count = min(chunk, len(tokens) - done)
            self._step([admission.handle], count, done, sampled=done + count == len(tokens))
        return admission.handle, (len(tokens) - admission.reused_tokens) / (self._clock() - begun_s)

    def _decode(self, handles: list[int], context: int, count: int) -> float:
        """Tokens/s of the whole batch."""
        begun_s, done = self._clock(), 0
        while done < count and self._clock() - begun_s < _DECODE_LIMIT_S:
            self._step(handles, 1, context + done, sampled=True)
            done += 1
        return done * len(handles) / (self._clock() - begun_s)

    def _full_batch(self, tokens: list[int]) -> None:
        handles = []
        for index in range(self._max_active):
            handle, _ = self._prefill([index + 1, *tokens], len(tokens) + 1)
            handles.append(handle)
        self._decode(handles, len(tokens) + 1, _BATCH_STEPS)
        for handle in handles:
            self._engine.release(handle, retain=False)

    def _start(self, tokens: list[int]) -> Admission:
        admission = self._engine.admit(tokens, _DECODE_TOKENS + 1, Sampling(), ignore_eos=True)
        if admission is None:
            raise StartupFailed("The KV cache is too small to measure with; raise --kv-tokens to at least 512.")
        return admission

    def _step(self, handles: list[int], count: int, at: int, *, sampled: bool) -> None:
        before_s = self._clock()
        self._engine.step([Slice(handle, count) for handle in handles])
        shape = StepShape.of((count, at, sampled) for _ in handles)
        self._steps.append((shape, self._clock() - before_s))


def step_target_s(decode_tokens_per_s: float) -> float:
    """How long a step with prefill in it may take where nobody said, from the isolated decode rate."""
    return max(STEP_TARGET_S, _FIXED_COSTS / decode_tokens_per_s)


@dataclass(frozen=True, slots=True)
class _Saved:
    format: int
    key: str
    measured_at: float
    """Unix time, for people."""
    profile: Profile


_FILE: TypeAdapter[_Saved] = TypeAdapter(_Saved)


class ProfileStore:
    """Profiles as small JSON files, one a combination of model, engine and settings."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, key: str) -> Profile | None:
        """The saved profile, or None when there is none, or none that can be read."""
        try:
            saved = _FILE.validate_json(self._path(key).read_bytes())
        except (OSError, ValidationError):
            return None
        return saved.profile if (saved.format, saved.key) == (_FORMAT, key) else None

    def save(self, key: str, profile: Profile) -> Path:
        """Write it whole or not at all. Raises OSError."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(_FILE.dump_json(_Saved(_FORMAT, key, time.time(), profile), indent=1))
        return partial.replace(path)

    def _path(self, key: str) -> Path:
        return self._directory / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _ordinary_tokens(vocabulary_size: int, count: int) -> Iterator[int]:
    """Token ids spread over the vocabulary, the same every time."""
    low = vocabulary_size // 50
    for index in range(count):
        yield low + index * 7919 % (vocabulary_size - low)
