"""A recorded decision of the predictive policy can be worked out again from its record alone."""

from __future__ import annotations

import random

import pytest

from phaseroute.v1 import router_pb2
from router_service.decision import RoutingRequest
from router_service.forecast import Job, Line, Load
from router_service.forecast_record import replay
from router_service.policies.predictive import Objective, Predictive
from service_kit.step_time import StepModel
from tests.unit.router.router_values import candidate, decision


def books(rng: random.Random, *, padded: bool) -> Load:
    def job(prefill: int) -> Job:
        return Job(
            prefill,
            rng.randint(1, 200),
            rng.randint(0, 600),
            rng.randint(100, 900),
            rng.choice([0.25, 1.0]),
            rng.choice([0.0, 0.05]),
            rng.uniform(-3, 3),
        )

    return Load(
        model=StepModel(0.004, 0.005, 0.006, 2e-6, 40, 0.001, ((1, 0.002), (4, -0.003))),
        max_active=4,
        step_tokens=rng.choice([32, 256]),
        step_target_s=rng.choice([None, 0.15]),
        free_kv_tokens=3000,
        padded_kv=padded,
        line=Line("priority", 30.0, 170.0),
        active=tuple(job(0) for _ in range(rng.randint(0, 4))),
        waiting=tuple(job(rng.randint(1, 300)) for _ in range(rng.randint(0, 9))),
        running_s=rng.uniform(0, 0.1),
        elapsed_s=rng.uniform(0.1, 0.4),
    )


@pytest.mark.parametrize("seed", range(12))
def test_scores_follow_from_the_record(seed):
    rng = random.Random(seed)
    objective = Objective(others_weight=rng.choice([0.0, 0.5, 1.0]), batch_weight=0.25)
    request = RoutingRequest(128, expected_new_tokens=rng.uniform(1, 128), batch=rng.random() < 0.5)
    candidates = [
        candidate(
            name,
            prompt_tokens=516,
            reusable_tokens=rng.choice([0, 496]),
            load=books(rng, padded=name == "b"),
            coming_in_s=(0.1, 0.2) if name == "c" else (),
        )
        for name in "abc"
    ]
    choice = Predictive(random.Random(0), objective)(request, candidates)
    wire = router_pb2.Decision.FromString(decision(request, candidates, choice).to_proto().SerializeToString())
    scores, latest_s = {}, max(replay(recorded).last_without_s for recorded in wire.candidates)
    for recorded in wire.candidates:
        assert recorded.priced_by == "forecast"
        again = replay(recorded)
        assert again.finish_s == recorded.predicted_finish_s
        assert again.ttft_s == recorded.predicted_ttft_s
        weights = recorded.forecast
        scores[recorded.backend] = (
            weights.own_weight * again.finish_s
            + weights.others_weight * again.delay_of_others_s
            + weights.latest_weight * max(0.0, again.last_s - latest_s)
        )
        assert scores[recorded.backend] == pytest.approx(recorded.score_s, abs=1e-12)
    assert wire.selected == min(scores, key=scores.__getitem__)


def test_a_candidate_that_was_not_forecast_has_no_record_of_one():
    request, crude = RoutingRequest(16), candidate("a")
    choice = Predictive(random.Random(0))(request, [crude])
    (recorded,) = decision(request, [crude], choice).to_proto().candidates
    assert recorded.priced_by == "two_phase"
    assert not recorded.HasField("forecast")
