"""Scenarios over gRPC: what is sent, what is measured, and what becomes of failures."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import pytest

from phaseroute.aio import AsyncClient
from phaseroute.bench.fleet import DIRECT, Fleet, Member, check_policies, find_fleet, until_idle, warm
from phaseroute.bench.play import Play
from phaseroute.bench.prompts import ScenarioPrompts
from phaseroute.bench.session import Session, schedule
from phaseroute.errors import PhaserouteError
from phaseroute.scenarios.planned import Planned, Scenario
from phaseroute.v1 import inference_pb2 as pb
from tests.clients.fake_service import FakeService, status
from tests.e2e.stacks import stack

FAST = {"engine": "simulated", "simulated_prefill_rate": 50_000.0, "simulated_decode_ms": "1:1,4:2", "kv_tokens": 4096}
SLOW = {**FAST, "simulated_decode_ms": "1:200"}


def planned(at_s: float = 0.0, prompt_tokens: int = 60, new_tokens: int = 8, **changes) -> Planned:
    values = {"at_s": at_s, "prompt_tokens": prompt_tokens, "max_new_tokens": new_tokens, "new_tokens": new_tokens}
    return Planned(**{**values, **changes})


def scenario(*requests: Planned, name: str = "s", warm: tuple[int, ...] = ()) -> Scenario:
    return Scenario(name, "", requests, warm)


async def play(client: AsyncClient, what: Scenario, policy: str, fleet: Fleet | None = None) -> Play:
    made = Play(what, policy, 0, fleet or await find_fleet(client))
    await made.send(client, ScenarioPrompts(what, seed=0, play=0), lambda *_: None)
    return made


class TestPlay:
    async def test_every_answer_is_measured_with_its_forecast(self):
        what = scenario(planned(), planned(0.03, prefix=0, prefix_tokens=40), planned(0.06, prefix=0, prefix_tokens=40))
        async with stack({"a": FAST, "b": FAST}) as it, AsyncClient(it.hosted.server.target) as client:
            run = (await play(client, what, "two_phase")).as_run()
        assert (run.policy, run.backends, run.simulated, len(run.served)) == ("two_phase", ("a", "b"), True, 3)
        for index, item in enumerate(run.served):
            assert (item.index, item.code, item.arrived_s) == (index, "OK", what.requests[index].at_s)
            assert (item.prompt_tokens, item.new_tokens, len(item.gaps_s)) == (60, 8, 7)
            assert item.backend in ("a", "b")
            assert 0 < item.ttft_s <= item.finish_s
            assert item.predicted_finish_s is not None
            assert 0 < sum(item.gaps_s) <= item.finish_s - item.ttft_s

    async def test_requests_go_out_when_due_whatever_became_of_those_before(self):
        what = scenario(planned(900.0, new_tokens=5), planned(900.1, new_tokens=1), planned(900.2, new_tokens=1))
        async with stack({"a": SLOW}) as it, AsyncClient(it.hosted.server.target) as client:
            async with asyncio.timeout(60):  # the scenario begins with its first arrival
                run = (await play(client, what, "two_phase")).as_run()
        first, *later = run.served
        # The others came and went while the first, of a second at least, was running.
        assert all(item.arrived_s + item.finish_s < first.arrived_s + first.finish_s for item in later)

    async def test_failures_are_outcomes_with_their_code(self):
        what = scenario(planned(prompt_tokens=9000), planned(new_tokens=50, deadline_s=0.3), planned(new_tokens=1))
        async with stack({"a": SLOW}) as it, AsyncClient(it.hosted.server.target) as client:
            made = await play(client, what, "two_phase")
        refused, late, answered = made.as_run().served
        assert (refused.code, late.code, answered.code) == ("INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "OK")
        assert (refused.backend, refused.prompt_tokens, refused.new_tokens) == ("", 9000, 0)
        assert late.new_tokens > 0
        assert "9000" in made.messages["INVALID_ARGUMENT"]
        assert made.complete

    async def test_cut_off_it_keeps_what_ended(self):
        what = scenario(planned(new_tokens=1), planned(new_tokens=500))
        ended = asyncio.Event()
        async with stack({"a": SLOW}) as it, AsyncClient(it.hosted.server.target) as client:
            made = Play(what, "two_phase", 0, await find_fleet(client))

            def on_event(*_: object) -> None:
                if made.served:
                    ended.set()

            sending = asyncio.create_task(made.send(client, ScenarioPrompts(what, seed=0, play=0), on_event))
            await ended.wait()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        assert not made.complete
        assert [item.index for item in made.as_run().served] == [0]

    async def test_what_a_scenario_asks_for_is_in_the_request(self, service: FakeService, target: str):
        fleet = Fleet((Member("small", status()),), routed=True)
        exact = planned(workload="chat", batch=True, ttft_slo_s=0.5)
        async with AsyncClient(target) as client:
            await play(client, scenario(exact), "two_phase", fleet)
            await play(client, scenario(planned(max_new_tokens=32)), DIRECT, fleet)
        first, second = service.requests
        assert (len(first.prompt.token_ids.ids), first.max_new_tokens, first.ignore_eos) == (60, 8, True)
        assert (first.workload, first.priority) == ("chat", pb.PRIORITY_BATCH)
        assert (first.routing.policy, first.routing.ttft_slo_s) == ("two_phase", 0.5)
        # A live model decides by itself where a shorter answer ends.
        assert (second.max_new_tokens, second.ignore_eos) == (32, False)
        assert (second.routing.policy, second.routing.HasField("ttft_slo_s")) == ("", False)


class TestFleet:
    async def test_a_single_backend_is_a_fleet_of_one_without_a_router(self):
        async with stack({"a": FAST}) as it, AsyncClient(it.backends["a"].server.target) as client:
            fleet = await find_fleet(client)
            run = (await play(client, scenario(planned()), DIRECT)).as_run()
            await until_idle(client, fleet, pytest.fail)
        assert (fleet.routed, fleet.names) == (False, ("simulated",))
        assert (run.served[0].backend, run.served[0].predicted_finish_s) == ("simulated", None)

    async def test_nobody_serving_is_said_with_the_remedy(self):
        async with stack({"a": FAST}) as it, AsyncClient(it.hosted.server.target) as client:
            await client.drain("a")
            with pytest.raises(PhaserouteError, match="no serving backend"):
                await find_fleet(client)

    async def test_a_policy_that_is_not_there_lists_those_that_are(self):
        async with stack({"a": FAST}) as it, AsyncClient(it.hosted.server.target) as client:
            await check_policies(client, ["two_phase", "forced:a"])
            with pytest.raises(PhaserouteError, match="round_robin"):
                await check_policies(client, ["two_phase", "fastest"])
            with pytest.raises(PhaserouteError, match="there are a"):
                await check_policies(client, ["forced:b"])

    async def test_warm_prefixes_are_on_every_backend(self):
        what = scenario(planned(prefix=3, prefix_tokens=40), planned(0.05, prefix=3, prefix_tokens=50), warm=(3,))
        prompts = ScenarioPrompts(what, seed=0, play=0)
        async with stack({"a": FAST, "b": FAST}) as it, AsyncClient(it.hosted.server.target) as client:
            fleet = await find_fleet(client)
            await warm(client, fleet, prompts, pytest.fail)
            for policy in ("forced:a", "forced:b"):
                cached = [item.cached_tokens for item in (await play(client, what, policy, fleet)).as_run().served]
                assert cached[0] >= 40
                assert cached[1] >= 50

    async def test_what_could_not_be_warmed_is_told(self):
        what = scenario(planned(5000, prompt_tokens=5000, prefix=3, prefix_tokens=4999), warm=(3,))
        told: list[str] = []
        async with stack({"a": FAST}) as it, AsyncClient(it.hosted.server.target) as client:
            await warm(client, await find_fleet(client), ScenarioPrompts(what, seed=0, play=0), told.append)
        assert len(told) == 1
        assert "a could not be warmed" in told[0]


class TestSession:
    def test_every_other_run_takes_the_policies_in_reverse(self):
        one, other = scenario(planned(), name="one"), scenario(planned(), name="other")
        turns = schedule([(one, other), (one, other)], ("p", "q"))
        assert [(turn.run, turn.scenario.name, turn.policy) for turn in turns] == [
            (0, "one", "p"), (0, "one", "q"), (0, "other", "p"), (0, "other", "q"),
            (1, "one", "q"), (1, "one", "p"), (1, "other", "q"), (1, "other", "p"),
        ]  # fmt: skip

    async def test_plays_leave_nothing_cached_for_each_other_but_what_is_warm(self):
        cold = scenario(planned(prefix=1, prefix_tokens=40), name="cold")
        hot = scenario(planned(prefix=1, prefix_tokens=40), name="hot", warm=(1,))
        watched: list[str] = []

        @contextmanager
        def watch(play: Play):
            watched.append(play.scenario.name)
            yield lambda *_: None

        async with stack({"a": FAST}) as it, AsyncClient(it.hosted.server.target) as client:
            session = Session(client, await find_fleet(client), seed=0, tell=pytest.fail)
            turns = schedule([(cold, hot)] * 2, ("two_phase",))
            cached = [made.as_run().served[0].cached_tokens async for made in session.run(turns, watch)]
        assert watched == ["cold", "hot"] * 2
        assert max(cached[0], cached[2]) < 4
        assert min(cached[1], cached[3]) >= 40
        assert all(made.complete for made in session.plays)
