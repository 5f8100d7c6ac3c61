"""The article's score: the work that waits plus this request, prefill and decode priced apart at isolated rates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router_service.decision import Candidate, Choice, Price, RoutingRequest
from router_service.policies.base import lowest
from router_service.policies.least_loaded import LeastLoaded


def price(request: RoutingRequest, candidate: Candidate) -> Price:
    """score = (waiting prefill + prompt - reusable) / prefill rate + (waiting decode + max_new_tokens) / decode rate

    The first token is expected when all but this request's own decode is done. Without rates there is no price.
    """
    if candidate.rates is None:
        return Price()
    prefill_s = candidate.prefill_tokens / candidate.rates.prefill_tokens_per_s
    decode_s = candidate.decode_tokens(request.max_new_tokens) / candidate.rates.decode_tokens_per_s
    own_decode_s = request.max_new_tokens / candidate.rates.decode_tokens_per_s
    score_s = prefill_s + decode_s
    return Price(
        score_s=score_s,
        predicted_ttft_s=score_s - own_decode_s,
        predicted_finish_s=score_s,
        priced_by="two_phase",
    )


@dataclass(frozen=True, slots=True)
class TwoPhase:
    """Lowest score wins. A candidate without rates is taken only when no other is left."""

    rng: random.Random
    name: str = "two_phase"
    forecasts: bool = False
    prices_reuse: bool = True

    def __call__(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Choice:
        """Choose by score, by requests when nobody has one."""
        prices = {candidate.name: price(request, candidate) for candidate in candidates}
        scores = {name: priced.score_s for name, priced in prices.items() if priced.score_s is not None}
        if not scores:
            fallback = LeastLoaded(self.rng)(request, candidates)
            return replace(
                fallback, prices=prices, reason=f"no candidate has measured rates to price it by; {fallback.reason}"
            )
        selected, tied = lowest(scores, self.rng)
        return Choice(selected, prices, _reason(selected, tied, scores, without=prices.keys() - scores.keys()))


def _reason(selected: str, tied: list[str], scores: dict[str, float], without: set[str]) -> str:
    score_s = scores[selected]
    others = {name: score for name, score in scores.items() if name not in tied}
    if len(tied) > 1:
        sentence = f"{' and '.join(tied)} tie at {score_s:.3f} s; {selected} was drawn at random"
    elif others:
        second = min(others, key=others.__getitem__)
        sentence = f"{selected} finishes first: {score_s:.3f} s, then {second} with {others[second]:.3f} s"
    else:
        sentence = f"{selected} is the only candidate with a price: {score_s:.3f} s"
    if without:
        sentence += f"; without measured rates: {', '.join(sorted(without))}"
    return sentence
