"""Which candidates are worth a probe: all but those that lose even with a full hit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from router_service.decision import Candidate, RoutingRequest
from router_service.policies.base import Policy


def worth_asking(
    policy: Policy, request: RoutingRequest, candidates: Sequence[Candidate], at_most_tokens: int | None
) -> list[Candidate]:
    """The candidates whose answer may change the choice, given a bound on the prompt's length (None: no bound).

    A candidate is left out when its best case, one token to prefill, scores worse than another's worst case, the whole
    bound to prefill. Only one whose context surely holds the request sets that bar: the others may drop out later.
    """
    if not policy.prices_reuse or at_most_tokens is None or len(candidates) < 2:
        return list(candidates)
    best = _scores(policy, request, candidates, prompt_tokens=1)
    worst = _scores(policy, request, candidates, prompt_tokens=at_most_tokens)
    needed_tokens = at_most_tokens + request.max_new_tokens
    bar = min((worst[c.name] for c in candidates if needed_tokens <= c.context_tokens), default=math.inf)
    return [candidate for candidate in candidates if best[candidate.name] <= bar]


def _scores(
    policy: Policy, request: RoutingRequest, candidates: Sequence[Candidate], prompt_tokens: int
) -> dict[str, float]:
    """Score by name when every prompt is that long and nothing is reusable; infinite without a price."""
    cold = [replace(candidate, prompt_tokens=prompt_tokens, reusable_tokens=0) for candidate in candidates]
    prices = policy(request, cold).prices
    scores = {name: price.score_s for name, price in prices.items()}
    return {c.name: math.inf if (score := scores.get(c.name)) is None else score for c in cold}
