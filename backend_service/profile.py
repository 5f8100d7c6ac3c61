"""How fast one request alone is on this engine, measured at start and remembered on disk."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from backend_service.engines.base import Engine, Slice
from backend_service.step_model import MIN_SAMPLES, IsolatedRates
from backend_service.step_samples import ENOUGH_ALIKE
from service_kit.faults import StartupFailed
from service_kit.requests import Sampling
from service_kit.state_files import SHARED, StateFile, StateFormat
from service_kit.step_time import StepShape

STEP_TARGET_S = 0.15
_FIXED_COSTS = 4.0
"""A step with prefill takes at least so many times as long as a decode step of one request. That is about what any step
costs, however little it computes: shorter ones would spend most of their time on it."""
MIN_STEP_TOKENS = 8
LIMIT_S = 4.5
"""A calibration begins no batch size that would end later than this."""
_PROBE_CHUNK_TOKENS = 16
_PROBE_DECODE_TOKENS = 3
_PREFILL_TOKENS = 384
_PREFILL_LIMIT_S = 1.2
_DECODE_TOKENS = 24
_DECODE_LIMIT_S = 0.6
_SLOWER = 0.9
"""A rate below this share of another one is slower, beyond noise."""
_BATCH_STEPS = 9
"""Of each batch size; the first one prepares, and is not a sample."""
_LEAST_BATCH_STEPS = 1 + ENOUGH_ALIKE
_BATCH_LIMIT_S = 0.35
_FILE = StateFormat("measured rates", 4, "rates are measured anew", mode=SHARED)


@dataclass(frozen=True, slots=True)
class Profile:
    """What a calibration found."""

    rates: IsolatedRates
    step_tokens: int
    """The token budget of a step that takes about `step_target_s`, from an empty context."""
    steps: tuple[tuple[StepShape, float], ...]
    """Every timed step with its seconds: the first samples of the step model."""
    measured_at: float
    """Unix time."""


class Calibration:
    """Times an idle engine, in less than five seconds; longer where a step of the largest batch takes a second."""

    def __init__(self, engine: Engine, *, max_active: int, step_tokens: int = 0, clock: Callable[[], float]) -> None:
        """`max_active`: the largest batch to time; `step_tokens` 0: found out from the measured prefill rate."""
        self._engine = engine
        self._max_active = max_active
        self._step_tokens = step_tokens
        self._clock = clock
        self._steps: list[tuple[StepShape, float]] = []

    def run(self) -> Profile:
        """Prefill alone, decode alone, then decode of batches, the largest first: what there is no time for lies
        between it and one request alone."""
        begun_s = self._clock()
        info = self._engine.info
        tokens = list(_ordinary_tokens(info.vocabulary.size, min(_PREFILL_TOKENS, info.context_tokens // 2)))
        handle, _ = self._prefill(tokens[:2], 1)
        self._engine.release(handle, retain=False)
        self._steps.clear()  # the first steps allocate: they are no samples
        handle, _ = self._prefill(tokens[: 2 * _PROBE_CHUNK_TOKENS], _PROBE_CHUNK_TOKENS)
        rough_rate = _PROBE_CHUNK_TOKENS / self._steps[-1][1]  # of the second chunk: see _prefill_warm
        target_s = step_target_s(self._decode([handle], 2 * _PROBE_CHUNK_TOKENS, _PROBE_DECODE_TOKENS))
        self._engine.release(handle, retain=False)
        step_tokens = self._budget(rough_rate, target_s)
        if step_tokens > 2 * _PROBE_CHUNK_TOKENS and not self._step_tokens:
            # Larger steps are faster ones, where a step's fixed cost is high.
            handle, rough_rate = self._prefill_warm(tokens[1 : 1 + step_tokens], step_tokens, rough_rate)
            self._engine.release(handle, retain=False)
            step_tokens = self._budget(rough_rate, target_s)
        prompt = tokens[: max(2 * _PROBE_CHUNK_TOKENS, int(rough_rate * _PREFILL_LIMIT_S))]
        handle, prefill_rate = self._prefill_warm(prompt, step_tokens, rough_rate)
        decode_rate = self._decode([handle], len(prompt), _DECODE_TOKENS)
        if self._max_active > 1:
            self._batches(handle, prompt, begun_s + LIMIT_S)
        else:
            self._engine.release(handle, retain=False)
        step_tokens = self._budget(prefill_rate, target_s)
        return Profile(IsolatedRates(prefill_rate, decode_rate), step_tokens, tuple(self._steps), time.time())

    def _prefill_warm(self, tokens: list[int], chunk: int, rough_rate: float) -> tuple[int, float]:
        """As `_prefill`; again, where that was slower than smaller steps, and then the second time counts: a GPU
        prepares itself for every new shape of a step, which can take ten times as long as the step."""
        samples = len(self._steps)
        handle, rate = self._prefill(tokens, chunk)
        if rate > _SLOWER * rough_rate:
            return handle, rate
        self._engine.release(handle, retain=False)
        del self._steps[samples:]
        return self._prefill(tokens, chunk)

    def _budget(self, prefill_rate: float, target_s: float) -> int:
        tokens = self._step_tokens or max(MIN_STEP_TOKENS, int(prefill_rate * target_s))
        return min(tokens, self._engine.info.max_step_tokens)

    def _prefill(self, tokens: list[int], chunk: int) -> tuple[int, float]:
        """The sequence, and tokens/s."""
        admission = self._engine.admit(tokens, _DECODE_TOKENS + 1, Sampling(), ignore_eos=True)
        if admission is None:
            raise StartupFailed("The KV cache is too small to measure with; raise --kv-tokens to at least 512.")
        begun_s = self._clock()
        for done in range(admission.reused_tokens, len(tokens), chunk):
            count = min(chunk, len(tokens) - done)
            self._step([admission.handle], count, done, sampled=done + count == len(tokens))
        return admission.handle, (len(tokens) - admission.reused_tokens) / (self._clock() - begun_s)

    def _decode(self, handles: list[int], context: int, count: int) -> float:
        """Tokens/s of one request."""
        begun_s, done = self._clock(), 0
        # A machine so slow that it is out of time still gets a step model out of it.
        while done < count and (self._clock() - begun_s < _DECODE_LIMIT_S or len(self._steps) < MIN_SAMPLES):
            self._step(handles, 1, context + done, sampled=True)
            done += 1
        return done / (self._clock() - begun_s)

    def _batches(self, computed: int, prompt: list[int], until_s: float) -> None:
        """Decode of powers of two and of the largest batch, as far as the KV cache has room and there is time: over a
        shared prompt, since a row costs more the longer its context is, or over single tokens where nothing is shared.
        Either way all of these steps are decode. `computed` is the sequence that has the prompt; it is released."""
        sizes = [size for bit in range(1, 7) if (size := 1 << bit) < self._max_active]
        sizes = [self._max_active, *reversed(sizes)]
        handles: list[int] = []
        context = len(prompt) - 1
        for index in range(self._max_active):
            steps = _BATCH_STEPS * sum(size > index for size in sizes)
            # Others share all of it but the last token, which is their own.
            own = prompt[index % len(prompt)]
            admission = self._engine.admit([*prompt[:context], own], steps + 1, Sampling(), ignore_eos=True)
            if admission is not None and admission.reused_tokens < context:
                self._engine.release(admission.handle, retain=False)
                context = 0
                admission = self._engine.admit([own], steps + 1, Sampling(), ignore_eos=True)
            if index == 0:  # the first one has the prompt now, or nobody needs it
                self._engine.release(computed, retain=False)
            if admission is None:
                break
            handles.append(admission.handle)
        done, last_s = context, 0.0
        for size in sizes:
            if size <= len(handles) and self._clock() + _LEAST_BATCH_STEPS * last_s < until_s:
                count, last_s = self._batch(handles[:size], done, until_s)
                done += count
        for handle in handles:
            self._engine.release(handle, retain=False)

    def _batch(self, handles: list[int], context: int, until_s: float) -> tuple[int, float]:
        """Steps that were run, and seconds of the last of them."""
        enough_s, done = self._clock() + _BATCH_LIMIT_S, 0
        while done < _BATCH_STEPS:
            now_s = self._clock()
            if done > 1 and (now_s >= until_s or (now_s >= enough_s and done >= _LEAST_BATCH_STEPS)):
                break
            self._step(handles, 1, context + done, sampled=True)
            done += 1
        del self._steps[-done]
        return done, self._steps[-1][1]

    def _step(self, handles: list[int], count: int, at: int, *, sampled: bool) -> None:
        before_s = self._clock()
        self._engine.step([Slice(handle, count) for handle in handles])
        shape = StepShape.of((count, at, sampled) for _ in handles)
        self._steps.append((shape, self._clock() - before_s))


def step_target_s(decode_tokens_per_s: float) -> float:
    """How long a step with prefill in it may take where nobody said, from the isolated decode rate."""
    return max(STEP_TARGET_S, _FIXED_COSTS / decode_tokens_per_s)


_PROFILE: TypeAdapter[Profile] = TypeAdapter(Profile)


class ProfileStore:
    """Profiles as small JSON files, one a combination of model, engine and settings."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, key: str) -> Profile | None:
        """The saved profile, or None when there is none, or none of use, and then a warning says why."""
        file = self._file(key)
        saved = file.read()
        if saved is None:
            return None
        if saved.get("key") != key:
            file.reject("it was measured for another model, engine or settings")
            return None
        try:
            profile = _PROFILE.validate_python(saved.get("profile"))
        except ValidationError:
            file.reject("it is not what this version writes")
            return None
        return profile

    def save(self, key: str, profile: Profile) -> Path:
        """Write it whole or not at all, with a warning; where it is then."""
        file = self._file(key)
        file.write({"key": key, "profile": _PROFILE.dump_python(profile, mode="json")})
        return file.path

    def _file(self, key: str) -> StateFile:
        return StateFile(self._directory / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json", _FILE)


def _ordinary_tokens(vocabulary_size: int, count: int) -> Iterator[int]:
    """Token ids spread over the vocabulary, the same every time."""
    low = vocabulary_size // 50
    for index in range(count):
        yield low + index * 7919 % (vocabulary_size - low)
