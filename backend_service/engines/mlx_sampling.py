"""One request's way to draw tokens from logits, in MLX: lazily, and from a random stream of its own.

Filters run in llama.cpp's order (penalties, top-k, top-p, min-p, temperature), so that a request means the same on both
engines. Not through mlx-lm's samplers: those draw from one random state for the whole thread, so a seeded answer would
depend on who else is there.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence

import mlx.core as mx

from backend_service.engines.base import Vocabulary
from backend_service.engines.seeds import mixed
from service_kit.requests import PENALTY_WINDOW_TOKENS, Sampling


class MlxSampler:
    """Draws tokens for one sequence."""

    def __init__(
        self,
        sampling: Sampling,
        vocabulary: Vocabulary,
        *,
        ignore_eos: bool,
        prompt: Sequence[int],
        drawn: int = 0,
    ) -> None:
        """`drawn`: so many of the last `prompt` tokens were drawn before."""
        self._sampling = sampling
        self._vocabulary_size = vocabulary.size
        self.bias = _never(vocabulary) if ignore_eos else None
        """(vocabulary,), added to the logits; None for nothing."""
        self._seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._draws = drawn
        self._window: mx.array | None = None
        """(up to 64,) tokens that penalties count, the newest last; None without penalties."""
        if sampling.penalized:
            self._window = mx.array(list(prompt[-PENALTY_WINDOW_TOKENS:]), mx.int32)

    @property
    def plain(self) -> bool:
        """The argmax of the logits is all there is to it, but for the bias."""
        return self._sampling.greedy and self._window is None

    def draw(self, logits: mx.array) -> mx.array:
        """(1,) the next token, from logits (1, vocabulary). Once for each token of the answer, in order."""
        logits = logits.astype(mx.float32)
        if self.bias is not None:
            logits = logits + self.bias
        if self._window is not None:
            logits = self._penalize(logits, self._window)
        token = mx.argmax(logits, axis=-1) if self._sampling.greedy else self._random(self._filter(logits))
        if self._window is not None:
            self._window = mx.concatenate([self._window, token.astype(mx.int32)])[-PENALTY_WINDOW_TOKENS:]
        return token

    def _penalize(self, logits: mx.array, window: mx.array) -> mx.array:
        """Repetition divides what is positive and multiplies what is not; frequency and presence are taken off."""
        counts = mx.zeros(self._vocabulary_size).at[window].add(1.0)
        seen = counts > 0
        repetition = self._sampling.repetition_penalty
        repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
        penalty = counts * self._sampling.frequency_penalty + seen * self._sampling.presence_penalty
        return mx.where(seen, repeated, logits) - penalty

    def _filter(self, logits: mx.array) -> mx.array:
        """-inf where a token may not be drawn."""
        sampling = self._sampling
        if 0 < sampling.top_k < self._vocabulary_size:
            least = mx.min(mx.topk(logits, sampling.top_k, axis=-1), axis=-1, keepdims=True)
            logits = mx.where(logits >= least, logits, -mx.inf)
        if sampling.top_p < 1.0:
            logits = _nucleus(logits, sampling.top_p)
        if sampling.min_p > 0.0:
            least = mx.max(logits, axis=-1, keepdims=True) + mx.log(mx.array(sampling.min_p))
            logits = mx.where(logits >= least, logits, -mx.inf)
        return logits

    def _random(self, logits: mx.array) -> mx.array:
        """A key for each draw, made from seed and position alone: the same whoever else draws, and in what order."""
        self._draws += 1
        key = mx.random.key(mixed(self._seed, self._draws))
        return mx.random.categorical(logits * (1.0 / self._sampling.temperature), key=key)


def draw(samplers: Sequence[MlxSampler], logits: mx.array) -> mx.array:
    """(rows,) int32: the next token of each row of logits (rows, vocabulary). Lazily."""
    biases = {id(sampler.bias): sampler.bias for sampler in samplers}
    if len(biases) == 1 and all(sampler.plain for sampler in samplers):
        (bias,) = biases.values()
        return mx.argmax(logits if bias is None else logits + bias, axis=-1).astype(mx.int32)
    rows = [sampler.draw(logits[index : index + 1]) for index, sampler in enumerate(samplers)]
    return mx.concatenate(rows).astype(mx.int32)


@functools.lru_cache(maxsize=8)
def _bias(size: int, forbidden: frozenset[int]) -> mx.array:
    bias = mx.array([-mx.inf if token in forbidden else 0.0 for token in range(size)])
    mx.eval(bias)
    return bias


def _never(vocabulary: Vocabulary) -> mx.array:
    """A bias under which the model cannot end its answer; the same object for the same vocabulary."""
    return _bias(vocabulary.size, vocabulary.eos)


def _nucleus(logits: mx.array, top_p: float) -> mx.array:
    """The most likely tokens whose probabilities first add up to `top_p`."""
    order = mx.argsort(-logits, axis=-1)
    probabilities = mx.softmax(mx.take_along_axis(logits, order, axis=-1), axis=-1, precise=True)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    keep = mx.put_along_axis(mx.zeros_like(order).astype(mx.bool_), order, before < top_p, axis=-1)
    return mx.where(keep, logits, -mx.inf)
