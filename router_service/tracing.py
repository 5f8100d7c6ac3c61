"""A decision as the attributes of its `route` span."""

from __future__ import annotations

import math

from opentelemetry.util.types import AttributeValue

from router_service.decision import Decision, Price
from service_kit.telemetry import Attr


def route_attributes(decision: Decision) -> dict[str, AttributeValue]:
    """The candidate table as parallel arrays; a candidate without a score has NaN."""
    candidates = decision.candidates
    prices = [decision.choice.prices.get(candidate.name, Price()) for candidate in candidates]
    max_new_tokens = decision.request.max_new_tokens
    return {
        Attr.DECISION_ID: decision.id,
        Attr.DECISION_POLICY: decision.policy,
        Attr.DECISION_SELECTED: decision.selected,
        Attr.DECISION_REASON: decision.choice.reason,
        Attr.ATTEMPT: decision.attempt,
        Attr.WORKLOAD: decision.request.workload,
        Attr.CANDIDATE_NAMES: [candidate.name for candidate in candidates],
        Attr.CANDIDATE_SCORES_S: [_or_nan(price.score_s) for price in prices],
        Attr.CANDIDATE_PREDICTED_FINISH_S: [_or_nan(price.predicted_finish_s) for price in prices],
        Attr.CANDIDATE_PRICED_BY: [price.priced_by for price in prices],
        Attr.CANDIDATE_ACTIVE: [candidate.active for candidate in candidates],
        Attr.CANDIDATE_QUEUED: [candidate.queued for candidate in candidates],
        Attr.CANDIDATE_PREFILL_TOKENS: [candidate.prefill_tokens for candidate in candidates],
        Attr.CANDIDATE_DECODE_TOKENS: [candidate.decode_tokens(max_new_tokens) for candidate in candidates],
        Attr.CANDIDATE_REUSABLE_TOKENS: [candidate.reusable_tokens for candidate in candidates],
        Attr.CANDIDATE_PROBE_OUTCOMES: [candidate.probe.value for candidate in candidates],
    }


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
