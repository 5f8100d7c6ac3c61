"""An engine without a model: it takes as long as it is told to, and its tokens are made up. For tests and planning.

Token ids are bytes (0..255) and one end token (256), so any text is a prompt. Each new token is a deterministic
function of all tokens before it: equal histories give equal continuations, whatever the batch, the cache or the chunks.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from backend_service.engines.base import Admission, EngineInfo, KvUse, Slice, StepResult, Vocabulary
from backend_service.kv_pool import Eviction, KvPool, PoolLimits
from backend_service.step_model import IsolatedRates
from service_kit.faults import InvalidRequest, StartupFailed
from service_kit.requests import ChatPrompt, Prompt, Sampling, TextPrompt, TokenPrompt

END_TOKEN = 256
_LETTERS = b"etaoin shrdlu cmfwyp vbgkjq xz, the and of to in is it. "
_MODULUS = (1 << 61) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15 % _MODULUS


@dataclass(frozen=True, slots=True)
class SimulatedSpeed:
    """How fast to pretend to be."""

    prefill_tokens_per_s: float
    decode_step_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of one decode step by batch size; linear in between, the outer segments extended."""
    reported_decode_tokens_per_s: float | None = None
    """The isolated rate that Status shows, where it is to differ from the true 1 / step_s(1)."""

    def rates(self) -> IsolatedRates:
        """One request alone, as reported."""
        return IsolatedRates(self.prefill_tokens_per_s, self.reported_decode_tokens_per_s or 1.0 / self.step_s(1))

    def step_s(self, rows: int) -> float:
        """Seconds of a decode step with this many rows."""
        if rows == 0:
            return 0.0
        sizes = sorted(self.decode_step_s)
        if len(sizes) == 1:
            return self.decode_step_s[sizes[0]]
        right = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        slope = (self.decode_step_s[high] - self.decode_step_s[low]) / (high - low)
        return max(0.0, self.decode_step_s[low] + slope * (rows - low))


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


@dataclass(slots=True)
class _Sequence:
    history: int
    """Hash of all computed tokens."""
    known: list[int]
    """Tokens that are known but not computed yet."""
    ignore_eos: bool


class SimulatedEngine:
    """Implements `Engine` over a clock that can be real or virtual."""

    def __init__(
        self,
        speed: SimulatedSpeed,
        limits: PoolLimits,
        *,
        model_name: str = "simulated",
        max_step_tokens: int = 512,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._speed = speed
        self._sleep = sleep
        self._pool = KvPool(limits)
        self._sequences: dict[int, _Sequence] = {}
        self.info = EngineInfo(
            name="simulated",
            device=f"simulated, {speed.prefill_tokens_per_s:g} prefill and "
            f"{speed.rates().decode_tokens_per_s:.4g} decode tok/s alone",
            simulated=True,
            model_name=model_name,
            model_fingerprint="simulated",
            tokenizer_fingerprint="bytes",
            precision="none",
            context_tokens=limits.capacity_tokens,
            max_step_tokens=max_step_tokens,
            vocabulary=Vocabulary(pieces=(*(bytes([value]) for value in range(256)), b""), eos=frozenset({END_TOKEN})),
        )

    def prepare(self, prompt: Prompt) -> Sequence[int]:
        """One token a UTF-8 byte; a chat becomes `role: content` lines."""
        match prompt:
            case TextPrompt(text):
                return list(text.encode())
            case ChatPrompt(turns):
                lines = "".join(f"{turn.role}: {turn.content}\n" for turn in turns)
                return list(f"{lines}assistant: ".encode())
            case TokenPrompt(ids):
                for index, token in enumerate(ids):
                    if token > END_TOKEN:
                        raise InvalidRequest(
                            f"prompt.token_ids[{index}]",
                            f"is {token}, but the vocabulary ends at {END_TOKEN}; tokenize with this model",
                        )
                return ids

    def probe(self, tokens: Sequence[int]) -> int:
        """See `Engine.probe`."""
        return self._pool.probe(tokens)

    def admit(
        self, tokens: Sequence[int], max_new_tokens: int, sampling: Sampling, *, ignore_eos: bool
    ) -> Admission | None:
        """See `Engine.admit`; `sampling` is ignored, since nothing is sampled."""
        placement = self._pool.place(tokens, max_new_tokens)
        if placement is None:
            return None
        self._evict(placement.evicted)
        reused = placement.reused_tokens
        for stored in placement.restorable:
            end = min(stored.block.end, len(tokens) - 1)
            self._pool.grow(placement.handle, tokens[reused:end])
            reused = end
        self._sequences[placement.handle] = _Sequence(_extend(0, tokens[:reused]), list(tokens[reused:]), ignore_eos)
        return Admission(placement.handle, reused)

    def step(self, slices: Sequence[Slice]) -> StepResult:
        """Takes the prefill tokens' time plus one decode step of as many rows as there are single known tokens left."""
        sampled: dict[int, list[int]] = {}
        prefill_tokens = rows = 0
        for piece in slices:
            sequence = self._sequences[piece.handle]
            computed, sequence.known = sequence.known[: piece.tokens], sequence.known[piece.tokens :]
            sequence.history = _extend(sequence.history, computed)
            self._pool.grow(piece.handle, computed)
            if piece.tokens == 1 and not sequence.known:
                rows += 1
            else:
                prefill_tokens += piece.tokens
            if not sequence.known:
                token = _next_token(sequence.history, ignore_eos=sequence.ignore_eos)
                sequence.known.append(token)
                sampled[piece.handle] = [token]
        self._sleep(prefill_tokens / self._speed.prefill_tokens_per_s + self._speed.step_s(rows))
        return StepResult(sampled)

    def release(self, handle: int, *, retain: bool) -> None:
        """See `Engine.release`."""
        del self._sequences[handle]
        self._evict(self._pool.release(handle, retain=retain))

    def stats(self) -> KvUse:
        """See `Engine.stats`."""
        return self._pool.use()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books add up."""
        self._pool.check_integrity()

    def _evict(self, evictions: Sequence[Eviction]) -> None:
        """A copy to host memory is nothing and takes no time; nor does bringing it back."""
        for eviction in evictions:
            for block in eviction.save:
                self._pool.stash(block, None)


def _extend(history: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        history = (history * _MULTIPLIER + token + 1) % _MODULUS
    return history


def _next_token(history: int, *, ignore_eos: bool) -> int:
    """A letter; the end token once in 128 times."""
    mixed = (history ^ (history >> 29)) * _MULTIPLIER % _MODULUS
    if not ignore_eos and mixed % 128 == 0:
        return END_TOKEN
    return _LETTERS[(mixed >> 7) % len(_LETTERS)]
