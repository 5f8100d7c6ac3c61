"""Decisions over a fleet that is too wide to look at in full."""

from __future__ import annotations

import itertools
import random
from functools import partial

from phaseroute.v1 import inference_pb2 as pb
from router_service.fleet import Fleet
from router_service.ledger import Ledger
from router_service.routing import Routing
from router_service.snapshot import Snapshot
from router_service.wide import LIKELY, SHORTLISTED
from service_kit.identity import ANYONE, Caller
from service_kit.requests import parse_generate
from service_kit.telemetry import Telemetry
from tests.unit.router.router_values import status

BACKENDS = 50


class AnsweredCall:
    """A CacheProbe call that is over already."""

    def __init__(self, reusable_tokens: int) -> None:
        self._answer = pb.CacheProbeResponse(prompt_tokens=100, reusable_tokens=reusable_tokens)

    def __await__(self):
        return self._answer
        yield

    def cancel(self) -> None:
        """Too late."""


class Stub:
    """Counts who was asked."""

    def __init__(self, reusable_tokens: int = 0) -> None:
        self.asked = 0
        self._reusable_tokens = reusable_tokens

    def CacheProbe(self, request, **options):
        self.asked += 1
        return AnsweredCall(self._reusable_tokens)


def wide(pause_s: float = 0.0, **reusable: int) -> tuple[Routing, Fleet, Ledger]:
    ledger = Ledger()
    names = [f"b{index}" for index in range(BACKENDS)]
    fleet = Fleet(dict.fromkeys(names, "127.0.0.1:1"), ledger)
    for name in names:
        message = status(step_rules=pb.StepRules(step_tokens=64))
        message.step_model.CopyFrom(pb.StepModel(base_s=0.01, per_token_s=1e-3, samples=50))
        fleet.backends[name].hear(Snapshot.of(message), 0.0)
        fleet.backends[name].stub = Stub(reusable.get(name, 0))
    routing = Routing(
        fleet,
        ledger,
        policy="predictive",
        probe_timeout_s=1.0,
        telemetry=Telemetry(),
        rng=random.Random(0),
        clock=partial(next, itertools.count(0.0, pause_s)),
    )
    return routing, fleet, ledger


async def decide(over: Routing, text: str = "word " * 200, caller: Caller = ANYONE, **fields):
    request = pb.GenerateRequest(prompt=pb.Prompt(text=text), max_new_tokens=50, **fields)
    return await over.decide(request.prompt, parse_generate(request), book=True, caller=caller)


async def test_only_a_shortlist_is_asked_and_priced_and_the_rest_is_counted():
    routing, fleet, _ = wide()
    decision = (await decide(routing)).decision
    asked = {name for name, backend in fleet.backends.items() if backend.stub.asked}
    assert SHORTLISTED <= len(asked) <= SHORTLISTED + LIKELY
    assert asked <= {candidate.name for candidate in decision.candidates}
    assert decision.not_shortlisted == BACKENDS - len(decision.candidates)
    assert decision.to_proto().not_shortlisted == decision.not_shortlisted


async def test_a_burst_spreads_over_the_fleet():
    routing, _, _ = wide()
    chosen = [(await decide(routing, text=f"{index} " * 100)).decision.selected for index in range(40)]
    assert len(set(chosen)) > 30


async def test_a_prompt_that_begins_like_an_earlier_one_finds_who_had_that():
    routing, _, ledger = wide(10.0, b7=90)
    text = "the same beginning " * 100
    first = await decide(routing, text=text, routing=pb.RoutingHints(backend="b7"))
    ledger.release(first.lease)
    again = (await decide(routing, text=text + "and another end")).decision
    assert "b7" in {candidate.name for candidate in again.candidates}
    assert again.selected == "b7"


async def test_a_pinned_request_is_not_lost_on_the_shortlist():
    routing, _, _ = wide()
    assert (await decide(routing, routing=pb.RoutingHints(backend="b49"))).decision.selected == "b49"


async def test_a_prompt_that_begins_alike_under_another_salt_looks_for_nobody():
    routing, _, ledger = wide(10.0, b7=90)
    text = "the same beginning " * 100
    alice, bob = (Caller(name, frozenset(), cache_salt=name) for name in ("alice", "bob"))
    first = await decide(routing, text=text, caller=alice, routing=pb.RoutingHints(backend="b7"))
    ledger.release(first.lease)
    found = [(await decide(routing, text=text, caller=who)).decision.selected for who in (alice, bob)]
    assert found[0] == "b7"
    assert found[1] != "b7"
