"""One share of the budget for all requests: high at first, lower the longer it proves enough."""

from __future__ import annotations

from typing import Any

from router_service.lengths.base import LengthOutcome, LengthQuery

INITIAL_RATIO = 0.7
LOWEST_RATIO = 0.7 * 0.14
DECAY_STEPS = 600
"""Decode steps from the initial ratio to the lowest."""
MAX_BUDGET_TOKENS = 4096
"""A larger budget counts as this."""
MARGIN_TOKENS = 20
"""By how much the answer that outlived the ratio would outlive the next one's."""
_FORMAT = 1
"""Of what `state` tells."""


class Ratio:
    """expected = ratio * min(max_new_tokens - generated, 4096)

    SGLang's `new_token_ratio`, with the defaults of its scheduler (INIT_NEW_TOKEN_RATIO 0.7, MIN_NEW_TOKEN_RATIO_FACTOR
    0.14, NEW_TOKEN_RATIO_DECAY_STEPS 600, RETRACT_DECODE_STEPS 20, CLIP_MAX_NEW_TOKENS_ESTIMATION 4096). There it falls
    with every decode step and jumps when the KV cache is full; a router sees neither, so here

    - an answer that the ratio covered counts as as many decode steps as it has tokens: ratio -= steps * (0.7 - 0.098) /
      600, down to 0.098;
    - one that outlived ratio * its budget, or was cut off there, lifts it to (tokens + 20) / budget, up to 1.
    """

    name = "ratio"

    def __init__(self) -> None:
        self.ratio = INITIAL_RATIO
        self.version = 0

    def expected(self, query: LengthQuery) -> float:
        """The ratio's share of what max_new_tokens leaves."""
        if query.ignore_eos:
            return float(query.budget_tokens)
        return max(1.0, self.ratio * min(query.budget_tokens, MAX_BUDGET_TOKENS))

    def observe(self, outcome: LengthOutcome) -> None:
        """Step down, or jump up."""
        tokens, budget = outcome.length_tokens, max(1, min(outcome.max_new_tokens, MAX_BUDGET_TOKENS))
        if tokens > self.ratio * budget:
            ratio = min(1.0, (tokens + MARGIN_TOKENS) / budget)
        else:
            ratio = max(LOWEST_RATIO, self.ratio - tokens * (INITIAL_RATIO - LOWEST_RATIO) / DECAY_STEPS)
        if ratio != self.ratio:
            self.ratio = ratio
            self.version += 1

    def state(self) -> dict[str, Any]:
        """The ratio."""
        return {"format": _FORMAT, "ratio": self.ratio} if self.version else {}

    def restore(self, state: object) -> bool:
        """See `LengthEstimator.restore`."""
        match state:
            case {"format": int(number), "ratio": float(ratio)} if number == _FORMAT and LOWEST_RATIO <= ratio <= 1:
                self.ratio = ratio
                self.version += 1
                return True
            case _:
                return False
