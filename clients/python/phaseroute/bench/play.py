"""One play of a scenario over gRPC: requests go out when they are due, whatever became of those before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phaseroute import results
from phaseroute.aio import AsyncClient
from phaseroute.bench.fleet import DIRECT, Fleet
from phaseroute.bench.prompts import ScenarioPrompts
from phaseroute.burst import RequestResult
from phaseroute.errors import PhaserouteError
from phaseroute.requests import GenerateOptions
from phaseroute.results import Delta, Finished
from phaseroute.scenarios.planned import Planned, Scenario
from phaseroute.scenarios.served import Run, Served

CANCELLED = "CANCELLED"

OnEvent = Callable[[int, Delta | Finished | PhaserouteError], None]
"""Told of each event of each request, by its index in the scenario."""


@dataclass(slots=True)
class Play:
    """One scenario under one policy, while it is played and afterwards."""

    scenario: Scenario
    policy: str
    run: int
    fleet: Fleet
    served: dict[int, Served] = field(default_factory=dict)
    """Requests that ended, by index."""
    messages: dict[str, str] = field(default_factory=dict)
    """What the first request that ended with a code was told, by code."""
    late_s: float = 0.0
    """How much later than due the latest request was sent: this client's own delay, part of that request's times."""

    @property
    def complete(self) -> bool:
        """Every request ended."""
        return len(self.served) == len(self.scenario.requests)

    def as_run(self) -> Run:
        """What there is; where it was cut off, only the requests that ended."""
        return Run(
            scenario=self.scenario.name,
            policy=self.policy,
            run=self.run,
            backends=self.fleet.names,
            simulated=self.fleet.simulated,
            served=tuple(self.served[index] for index in sorted(self.served)),
        )

    async def send(self, client: AsyncClient, prompts: ScenarioPrompts, on_event: OnEvent) -> None:
        """Play it to the end. A request that fails is one outcome of many: nothing is raised for it. Being cancelled
        cancels what runs; what ended before stays in `served`."""
        requests = self.scenario.requests
        made = [prompts.prompt(index, planned) for index, planned in enumerate(requests)]
        start_s = time.perf_counter() - (requests[0].at_s if requests else 0.0)
        async with asyncio.TaskGroup() as group:
            for index, planned in enumerate(requests):
                group.create_task(self._one(client, index, planned, made[index], start_s, on_event))

    async def _one(
        self,
        client: AsyncClient,
        index: int,
        planned: Planned,
        prompt: tuple[int, ...],
        start_s: float,
        on_event: OnEvent,
    ) -> None:
        due_s = start_s + planned.at_s
        await asyncio.sleep(due_s - time.perf_counter())
        self.late_s = max(self.late_s, time.perf_counter() - due_s)
        token_times_s: list[float] = []
        events: list[Delta | Finished] = []
        try:
            call = client.generate(prompt, timeout_s=planned.deadline_s, **_options(planned, self.policy))
            async with call as stream:
                async for event in stream:
                    if isinstance(event, Delta):
                        token_times_s += [time.perf_counter() - due_s] * len(event.token_ids)
                    events.append(event)
                    on_event(index, event)
            finish_s = time.perf_counter() - due_s
            result = RequestResult(
                sent_s=planned.at_s,
                ttft_s=token_times_s[0] if token_times_s else finish_s,
                e2e_s=finish_s,
                token_times_s=tuple(token_times_s),
                answer=results.completion(events),
                decision=None,
            )
        except PhaserouteError as error:
            self.served[index] = _failed(index, planned, error.code.name, len(token_times_s))
            self.messages.setdefault(error.code.name, error.message)
            on_event(index, error)
        else:
            self.served[index] = _answered(index, planned, result, self.fleet)


def _options(planned: Planned, policy: str) -> GenerateOptions:
    options = GenerateOptions(
        max_new_tokens=planned.max_new_tokens,
        # A live model cannot be told to end early: a shorter answer is the model's own decision.
        ignore_eos=planned.new_tokens == planned.max_new_tokens,
        priority="batch" if planned.batch else "interactive",
        workload=planned.workload,
    )
    if policy != DIRECT:
        options["policy"] = policy
    if planned.ttft_slo_s is not None:
        options["ttft_slo_s"] = planned.ttft_slo_s
    return options


def _answered(index: int, planned: Planned, result: RequestResult, fleet: Fleet) -> Served:
    usage, routing = result.answer.usage, result.answer.routing
    return Served(
        index=index,
        arrived_s=planned.at_s,
        code="OK",
        backend=routing.backend if routing else fleet.names[0],
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        new_tokens=usage.generated_tokens,
        workload=planned.workload,
        ttft_s=result.ttft_s,
        finish_s=result.e2e_s,
        predicted_ttft_s=routing.predicted_ttft_s if routing else None,
        predicted_finish_s=routing.predicted_finish_s if routing else None,
        gaps_s=result.gaps_s,
    )


def _failed(index: int, planned: Planned, code: str, new_tokens: int) -> Served:
    """Where it ran is not known: only the last message of an answer says so."""
    return Served(
        index=index,
        arrived_s=planned.at_s,
        code=code,
        backend="",
        prompt_tokens=planned.prompt_tokens,
        cached_tokens=0,
        new_tokens=new_tokens,
        workload=planned.workload,
    )
