"""An engine without a model: it takes as long as it is told to, and its tokens are made up. For tests and planning.

Token ids are bytes (0..255) and one end token (256), so any text is a prompt. Each new token is a deterministic
function of all tokens before it: equal histories give equal continuations, whatever the batch, the cache or the chunks.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from backend_service.engines.base import Admission, EngineInfo, KvUse, Slice, StepResult, Vocabulary
from backend_service.engines.simulated_speed import ModelSpeed, SimulatedSpeed, Speed, parse_decode_steps
from backend_service.kv_pool import Eviction, KvPool, PoolLimits
from backend_service.prefix_index import PACKED
from service_kit.faults import InvalidRequest
from service_kit.requests import ChatPrompt, Prompt, Sampling, TextPrompt, TokenPrompt
from service_kit.step_time import StepShape

__all__ = ["END_TOKEN", "ModelSpeed", "SimulatedEngine", "SimulatedSpeed", "Speed", "parse_decode_steps"]

END_TOKEN = 256
_LETTERS = b"etaoin shrdlu cmfwyp vbgkjq xz, the and of to in is it. "
_MODULUS = (1 << 61) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15 % _MODULUS
_PACKED_TOKENS = tuple(array(PACKED, (token,)).tobytes() for token in range(END_TOKEN + 1))


@dataclass(slots=True)
class _Sequence:
    history: int
    """Hash of all computed tokens: the same however they were cut into chunks."""
    known: array[int]
    """Tokens that are known but not computed yet."""
    computed: int
    """How many tokens are."""
    ignore_eos: bool
    ends_after: int | None
    """New tokens after which it is over in any case, an end token included; None: the end token may come at any
    time."""
    answer: int | None
    """New tokens before the end token, where that was said."""
    resumed: int = 0
    """New tokens that were there when it began; they count as sampled."""
    sampled: int = 0

    @property
    def decoding(self) -> bool:
        """Its first token is out."""
        return self.sampled > self.resumed

    @property
    def sure_steps(self) -> int:
        """Decode steps that it goes on for, as far as is known; the last one may end it."""
        return 1 if self.ends_after is None else max(1, self.ends_after - self.sampled)

    def compute(self, tokens: int) -> array[int]:
        """The next known tokens, which are computed now."""
        computed, self.known = self.known[:tokens], self.known[tokens:]
        self.history = crc32(computed, self.history)
        self.computed += tokens
        return computed

    def sample(self) -> int:
        """A new token; it is known from now on."""
        self.sampled += 1
        if self.answer is not None and self.sampled > self.answer:
            token = END_TOKEN
        else:
            token = _next_token(self.history, ignore_eos=self.ignore_eos or self.answer is not None)
        self.known.append(token)
        return token

    def decode(self, steps: int) -> list[int]:
        """`compute` one token and `sample`, so many times, for a leap: what was computed, then the last
        sampled one. Its first token is out, so that the known one was sampled, too."""
        known = self.known[0]
        tokens, history = [known], self.history
        sure = self.ignore_eos or self.answer is not None
        last = steps if self.answer is None else self.answer - self.sampled
        for step in range(steps):
            history = crc32(_PACKED_TOKENS[known], history)
            known = END_TOKEN if step == last else _next_token(history, ignore_eos=sure)
            tokens.append(known)
        self.history = history
        self.known[0] = known
        self.computed += steps
        self.sampled += steps
        return tokens


class SimulatedEngine:
    """Implements `Engine` over a clock that can be real or virtual."""

    def __init__(
        self,
        speed: Speed,
        limits: PoolLimits,
        *,
        model_name: str = "simulated",
        max_step_tokens: int = 512,
        sleep: Callable[[float], None] = time.sleep,
        answer_tokens: Callable[[Sequence[int]], int | None] | None = None,
    ) -> None:
        """`answer_tokens`: from a prompt to the number of tokens after which the answer ends by itself, unless the
        request ignores that; None, for all or for one prompt: the end token comes at random."""
        self._speed = speed
        self._sleep = sleep
        self._answer_tokens = answer_tokens
        self._pool = KvPool(limits)
        self._sequences: dict[int, _Sequence] = {}
        self.slowdown = 1.0
        """Every step from now on takes so many times as long."""
        self.leap = 0
        """Above 0: the next step is so many at once, as far as `decode_ahead` told of them before. For virtual time."""
        self._ahead_s: list[float] = []
        """Durations of the decode steps that were told of and are still to come, if nothing else comes first."""
        rates = speed.rates()
        self.info = EngineInfo(
            name="simulated",
            device=f"simulated, {rates.prefill_tokens_per_s:g} prefill and "
            f"{rates.decode_tokens_per_s:.4g} decode tok/s alone",
            simulated=True,
            model_name=model_name,
            model_fingerprint="simulated",
            tokenizer_fingerprint="bytes",
            precision="none",
            context_tokens=limits.capacity_tokens,
            max_step_tokens=max_step_tokens,
            vocabulary=Vocabulary(pieces=(*(bytes([value]) for value in range(256)), b""), eos=frozenset({END_TOKEN})),
        )

    def prepare(self, prompt: Prompt, cache_salt: str = "") -> Sequence[int]:
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

    def probe(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """See `Engine.probe`."""
        return self._pool.probe(tokens, cache_salt)

    def admit(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        *,
        ignore_eos: bool,
        generated: int = 0,
        cache_salt: str = "",
    ) -> Admission | None:
        """See `Engine.admit`; `sampling` is ignored, since nothing is sampled."""
        placement = self._pool.place(tokens, max_new_tokens, cache_salt)
        if placement is None:
            return None
        self._ahead_s = []
        self._evict(placement.evicted)
        reused = placement.reused_tokens
        for stored in placement.restorable:
            end = min(stored.block.end, len(tokens) - 1)
            self._pool.grow(placement.handle, tokens[reused:end])
            reused = end
        packed = array(PACKED, tokens)
        prompt = tokens[: len(tokens) - generated]
        answer = None if ignore_eos or self._answer_tokens is None else self._answer_tokens(prompt)
        ends_after: int | None = generated + max_new_tokens
        if not ignore_eos:
            ends_after = None if answer is None else min(generated + max_new_tokens, answer + 1)
        self._sequences[placement.handle] = _Sequence(
            crc32(packed[:reused]), packed[reused:], reused, ignore_eos, ends_after, answer, generated, generated
        )
        return Admission(placement.handle, reused)

    @property
    def live(self) -> int:
        """Sequences that were admitted and not released."""
        return len(self._sequences)

    def decode_ahead(self, most: int) -> list[float]:
        """How long each of the coming steps will take as long as all live sequences decode and none ends: `most` of
        them, or up to the one in which one may end. Empty when one is in prefill, or there is none."""
        if not self._sequences or not all(sequence.decoding for sequence in self._sequences.values()):
            return []
        sequences = self._sequences.values()
        steps = min(most, min(sequence.sure_steps for sequence in sequences))
        rows = len(sequences)
        attended = float(sum(sequence.computed + 1 for sequence in sequences))
        self._ahead_s = [
            self.slowdown * self._speed.seconds(0, StepShape(rows, rows, attended + step * rows))
            for step in range(steps)
        ]
        return list(self._ahead_s)

    def step(self, slices: Sequence[Slice]) -> StepResult:
        """Takes what `Speed.seconds` says, `slowdown` times. A slice of a single token that is the last known one
        counts as decode."""
        leap, self.leap = min(self.leap, len(self._ahead_s)), 0
        if leap:
            return self._decode(slices, leap)
        self._ahead_s = []
        sampled: dict[int, list[int]] = {}
        tokens = prefill_tokens = 0
        attended = 0.0
        for piece in slices:
            sequence = self._sequences[piece.handle]
            tokens += piece.tokens
            attended += piece.tokens * (sequence.computed + (piece.tokens + 1) / 2)
            self._pool.grow(piece.handle, sequence.compute(piece.tokens))
            if piece.tokens > 1 or sequence.known:
                prefill_tokens += piece.tokens
            if not sequence.known:
                sampled[piece.handle] = [sequence.sample()]
        shape = StepShape(tokens, len(sampled), attended)
        self._sleep(self.slowdown * self._speed.seconds(prefill_tokens, shape))
        return StepResult(sampled)

    def _decode(self, slices: Sequence[Slice], steps: int) -> StepResult:
        """Several steps at once, those that `decode_ahead` told of."""
        sampled: dict[int, list[int]] = {}
        for piece in slices:
            tokens = self._sequences[piece.handle].decode(steps)
            sampled[piece.handle] = tokens[1:]
            self._pool.grow(piece.handle, tokens[:-1])
        for duration_s in self._ahead_s[:steps]:  # one by one: the clock comes to the same last digit as step by step
            self._sleep(duration_s)
        del self._ahead_s[:steps]
        return StepResult(sampled, steps=steps)

    def release(self, handle: int, *, retain: bool) -> None:
        """See `Engine.release`."""
        del self._sequences[handle]
        self._ahead_s = []
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


def _next_token(history: int, *, ignore_eos: bool) -> int:
    """A letter; the end token once in 128 times."""
    mixed = (history ^ (history >> 29)) * _MULTIPLIER % _MODULUS
    if not ignore_eos and mixed % 128 == 0:
        return END_TOKEN
    return _LETTERS[(mixed >> 7) % len(_LETTERS)]
