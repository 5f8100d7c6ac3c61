"""One request's sampler chain in llama.cpp."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from backend_service.engines.base import Vocabulary
from backend_service.engines.seeds import mixed
from service_kit.requests import PENALTY_WINDOW_TOKENS, Sampling

_RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp takes this seed to mean "any"."""


class LlamaSampler:
    """Draws tokens for one sequence: logit bias, penalties, top-k, top-p, min-p, temperature, draw. Freed with the
    last reference.

    Each draw has a generator of its own, since llama.cpp (but for its newest versions) takes nothing from one where a
    single candidate is left: how far a common one is after n tokens could not be known without computing them all.
    """

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
        self._draws = drawn
        self._seed: int | None = None
        self._forbidden = sorted(vocabulary.eos) if ignore_eos else []
        self._chain: llama_cpp.llama_sampler_p | None = None
        if sampling.greedy and not sampling.penalized:
            return  # argmax of the logits, an order of magnitude cheaper than llama.cpp's way through candidates
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        weakref.finalize(self, llama_cpp.llama_sampler_free, chain)
        self._chain = chain
        if ignore_eos:
            self._add(_forbid(vocabulary))
        if sampling.penalized:
            self._add(
                llama_cpp.llama_sampler_init_penalties(
                    vocabulary.size,
                    PENALTY_WINDOW_TOKENS,
                    sampling.repetition_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
            )
        if sampling.greedy:
            self._add(llama_cpp.llama_sampler_init_greedy())
        else:
            if sampling.top_k:
                self._add(llama_cpp.llama_sampler_init_top_k(sampling.top_k))
            if sampling.top_p < 1.0:
                self._add(llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1))
            if sampling.min_p > 0.0:
                self._add(llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1))
            self._add(llama_cpp.llama_sampler_init_temp(sampling.temperature))
            self._seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        if sampling.penalized:
            for token in prompt[-PENALTY_WINDOW_TOKENS:]:
                llama_cpp.llama_sampler_accept(chain, token)

    def sample(self, context: llama_cpp.llama_context_p, row: int, logits: NDArray[np.float32]) -> int:
        """The next token from an output row of the last decode: `row` is its place in the batch, `logits` (vocabulary)
        are its own, which may be changed."""
        if self._chain is None:
            logits[self._forbidden] = -np.inf
            return int(logits.argmax())
        if self._seed is None:
            return int(llama_cpp.llama_sampler_sample(self._chain, context, row))
        self._draws += 1
        self._add(llama_cpp.llama_sampler_init_dist(mixed(self._seed, self._draws) % _RANDOM_SEED))
        token = int(llama_cpp.llama_sampler_sample(self._chain, context, row))
        last = llama_cpp.llama_sampler_chain_n(self._chain) - 1
        llama_cpp.llama_sampler_free(llama_cpp.llama_sampler_chain_remove(self._chain, last))
        return token

    def _add(self, sampler: llama_cpp.llama_sampler_p) -> None:
        llama_cpp.llama_sampler_chain_add(self._chain, sampler)  # the chain owns it from here


def _forbid(vocabulary: Vocabulary) -> llama_cpp.llama_sampler_p:
    """A sampler under which the model cannot end its answer."""
    biases = (llama_cpp.llama_logit_bias * len(vocabulary.eos))(
        *(llama_cpp.llama_logit_bias(token, float("-inf")) for token in sorted(vocabulary.eos))
    )
    sampler: llama_cpp.llama_sampler_p = llama_cpp.llama_sampler_init_logit_bias(vocabulary.size, len(biases), biases)
    return sampler
