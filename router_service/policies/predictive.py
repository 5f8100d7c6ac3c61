"""Where everything finishes soonest: each candidate's schedule is played forward with the request and without it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from router_service.decision import Candidate, Choice, Price, RoutingRequest
from router_service.exploration import ExplorationLimits, has_slack
from router_service.forecast import Forecast, Job, Load, forecast
from router_service.policies.base import lowest
from router_service.policies.least_loaded import LeastLoaded
from router_service.policies.two_phase import price as two_phase_price
from router_service.worst_case import worst_case_tokens

FORECAST = "forecast"
EXPLORATION = "exploration"


@dataclass(frozen=True, slots=True)
class Objective:
    """What the predictive policy minimises."""

    others_weight: float = 1.0
    """Of the delay that a request puts on others, beside its own finish time. 0: only its own counts."""
    latest_weight: float = 1.0
    """Of how much later the last request of all, on any backend, finishes. Sums alone are almost indifferent to who
    works last, so that one backend may go on for a while when all others are done."""
    batch_weight: float = 1.0
    """Of the finish time of a request with priority batch; an interactive one weighs 1."""
    exploration: ExplorationLimits = field(default_factory=ExplorationLimits)


def own_job(request: RoutingRequest, candidate: Candidate, load: Load, weight: float) -> Job:
    """The request as it would stand in the candidate's line, from now on."""
    prefill_tokens = max(1, candidate.prompt_tokens - candidate.reusable_tokens)
    return Job(
        prefill_tokens=prefill_tokens,
        decode_tokens=math.ceil(request.new_tokens),
        context_tokens=candidate.reusable_tokens,
        kv_tokens=worst_case_tokens(
            candidate.prompt_tokens, candidate.reusable_tokens, request.max_new_tokens, padded=load.padded_kv
        ),
        weight=weight,
        joined_s=load.elapsed_s,
        due_s=load.line.due_s(load.elapsed_s, prefill_tokens, batch=request.batch, client=request.client),
    )


def prices(request: RoutingRequest, candidates: Sequence[Candidate], objective: Objective) -> dict[str, Price]:
    """score = weight * own finish + others_weight * (how much later the others finish, by their weights)
    + latest_weight * (how much later the last request of all finishes)

    Without a step model to play with, own finish and first token are two_phase's, and what the others lose is unknown;
    without rates there is no price.
    """
    weight = objective.batch_weight if request.batch else 1.0
    jobs: dict[str, Job] = {}
    seen: dict[str, Forecast] = {}
    loads: dict[str, Load] = {}
    for candidate in candidates:
        if candidate.load is not None:
            name = candidate.name
            own = jobs[name] = own_job(request, candidate, candidate.load, weight)
            loads[name] = _with_coming(candidate.load, own, candidate.coming_in_s)
            seen[name] = forecast(loads[name], own)
    latest_s = max((each.last_without_s for each in seen.values()), default=0.0)
    priced = {}
    for candidate in candidates:
        name = candidate.name
        if name in seen:
            price = _price(loads[name], jobs[name], seen[name], latest_s, objective)
        else:
            price = two_phase_price(request, candidate)
            if price.score_s is not None:
                price = replace(price, score_s=weight * price.score_s)
        unfit = _unfit(request, price)
        priced[name] = replace(price, unfit=unfit) if unfit else price
    return priced


def _price(load: Load, own: Job, seen: Forecast, latest_s: float, objective: Objective) -> Price:
    later_s = max(0.0, seen.last_s - latest_s)
    return Price(
        score_s=own.weight * seen.finish_s
        + objective.others_weight * seen.delay_of_others_s
        + objective.latest_weight * later_s,
        predicted_ttft_s=seen.ttft_s,
        predicted_finish_s=seen.finish_s,
        priced_by=FORECAST,
        delay_of_others_s=seen.delay_of_others_s,
        delay_of_last_s=later_s,
        weights=(own.weight, objective.others_weight, objective.latest_weight),
        load=load,
        own=own,
    )


def _with_coming(load: Load, own: Job, coming_in_s: Sequence[float]) -> Load:
    """With more requests like this one that are likely to come; they delay it, and weigh nothing themselves."""
    if not coming_in_s:
        return load
    likely = (replace(own, weight=0.0, joined_s=own.joined_s + in_s, due_s=own.due_s + in_s) for in_s in coming_in_s)
    return replace(load, waiting=(*load.waiting, *likely))


def _unfit(request: RoutingRequest, priced: Price) -> str:
    slo_s, deadline_s = request.hints.ttft_slo_s, request.deadline_s
    if slo_s is not None and priced.predicted_ttft_s is not None and priced.predicted_ttft_s > slo_s:
        return f"its first token would come after {priced.predicted_ttft_s:.3g} s, not within {slo_s:.3g} s"
    if deadline_s is not None and priced.predicted_finish_s is not None and priced.predicted_finish_s > deadline_s:
        return f"it would finish after {priced.predicted_finish_s:.3g} s, past the deadline in {deadline_s:.3g} s"
    return ""


@dataclass(frozen=True, slots=True)
class Predictive:
    """Lowest score wins. Candidates that would miss the request's deadline or time to first token are left out, and
    when all would, none is chosen. One without a price is taken when no other is there, or to measure it, by a request
    that has time to spare."""

    rng: random.Random
    objective: Objective = field(default_factory=Objective)
    name: str = "predictive"
    forecasts: bool = True
    prices_reuse: bool = False
    """It does price reuse, but to price twice in order to save a probe costs more than the probe."""

    def __call__(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Choice:
        """Choose by score, by requests when nobody has one."""
        priced = prices(request, candidates, self.objective)
        fit = {name: p.score_s for name, p in priced.items() if p.score_s is not None and not p.unfit}
        explored = self._to_explore(request, candidates, priced, fit)
        if explored is not None:
            priced[explored.name] = replace(priced[explored.name], priced_by=EXPLORATION)
            return Choice(explored.name, priced, f"{explored.name} is to be measured: {explored.unmeasured}")
        if fit:
            selected, tied = lowest(fit, self.rng)
            return Choice(selected, priced, _reason(selected, tied, priced, fit))
        if any(p.unfit for p in priced.values()):
            return _refusal(priced)
        fallback = LeastLoaded(self.rng)(request, candidates)
        return replace(
            fallback, prices=priced, reason=f"no candidate has measured rates to price it by; {fallback.reason}"
        )

    def _to_explore(
        self,
        request: RoutingRequest,
        candidates: Sequence[Candidate],
        priced: Mapping[str, Price],
        fit: Mapping[str, float],
    ) -> Candidate | None:
        wanted = [candidate for candidate in candidates if candidate.unmeasured]
        if not wanted or request.hints.ttft_slo_s is not None:
            return None
        finishes_s = [finish for name in fit if (finish := priced[name].predicted_finish_s) is not None]
        best_s = min(finishes_s, default=None)
        able = [
            candidate
            for candidate in wanted
            if has_slack(
                batch=request.batch,
                deadline_s=request.deadline_s,
                best_finish_s=best_s,
                finish_there_s=priced[candidate.name].predicted_finish_s,
                limits=self.objective.exploration,
            )
        ]
        return self.rng.choice(able) if able else None


def _refusal(prices: Mapping[str, Price]) -> Choice:
    finishes_s = {name: p.predicted_finish_s for name, p in prices.items() if p.predicted_finish_s is not None}
    first = min(finishes_s, key=finishes_s.__getitem__)
    return Choice(
        "",
        prices,
        f"No backend can answer in time: even {first}, which would finish first, is too late: {prices[first].unfit}",
        retry_after_s=finishes_s[first],
    )


def _reason(selected: str, tied: list[str], prices: Mapping[str, Price], fit: Mapping[str, float]) -> str:
    chosen = prices[selected]
    others = {name: score for name, score in fit.items() if name not in tied}
    told = f"{chosen.predicted_finish_s:.3f} s"
    if chosen.delay_of_others_s > 0:
        told += f" and {chosen.delay_of_others_s:.3f} s later for others"
    if len(tied) > 1:
        sentence = f"{' and '.join(tied)} tie at {fit[selected]:.3f} s; {selected} was drawn at random"
    elif others:
        second = min(others, key=others.__getitem__)
        sentence = f"{selected} costs least: finish in {told}; {second} would cost {others[second]:.3f} s"
    else:
        sentence = f"{selected} is the only candidate that can be priced: finish in {told}"
    late = sorted(name for name, p in prices.items() if p.unfit)
    if late:
        sentence += f"; too late: {', '.join(late)}"
    crude = sorted(name for name, p in prices.items() if p.priced_by == "two_phase")
    if crude:
        sentence += f"; without a step model, priced as two_phase does: {', '.join(crude)}"
    return sentence
