"""One sequence of the llama.cpp engine: what of it is computed, and how it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from backend_service.engines.llama_sampling import LlamaSampler


@dataclass(slots=True)
class LlamaSequence:
    """Between two steps: `computed_tokens` are in the KV cache, `known` are to be computed, the next n of them in one
    slice. Where that reaches the last known one, guesses may follow it."""

    sampler: LlamaSampler
    computed_tokens: int
    known: list[int]
    guess: Sequence[int] = field(default=(), init=False)
    """Of the step that runs."""

    def rows(self, tokens: int, guess: Sequence[int]) -> tuple[Sequence[int], int]:
        """What a step computes for a slice of so many tokens, and how many of the last rows need logits."""
        if tokens < len(self.known):
            return self.known[:tokens], 0
        self.guess = guess
        return ([*self.known, *guess] if guess else self.known), 1 + len(guess)

    def draw(self, context: llama_cpp.llama_context_p, row: int, logits: NDArray[np.float32]) -> list[int]:
        """Sample row after row, the first at `row`, as long as the guess before was right. `logits`: (rows,
        vocabulary). The tokens are those that would have come one by one: each row is drawn from as if alone."""
        drawn: list[int] = []
        for index, own in enumerate(logits):
            drawn.append(self.sampler.sample(context, row + index, own))
            if index < len(self.guess) and drawn[-1] != self.guess[index]:
                break
        return drawn

    def advance(self, tokens: int, drawn: Sequence[int]) -> Sequence[int]:
        """The slice is computed and brought these tokens, all but the last of them as guessed; the tokens that are
        computed now and were not before. Wrong guesses are to be cut from the cache at `computed_tokens`."""
        computed: Sequence[int]
        if drawn:
            computed = [*self.known, *drawn[:-1]] if len(drawn) > 1 else self.known
            self.known = [drawn[-1]]
        else:
            computed, self.known = self.known[:tokens], self.known[tokens:]
        self.computed_tokens += len(computed)
        return computed
