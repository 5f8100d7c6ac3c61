"""What a scheduling policy decides: one backend's line of requests, with the speed of llama.cpp on one core.

The scenarios are plain lists of arrivals, so that they can be played on a real backend too; `simulate` plays them in
virtual time. Everything that comes out of that is simulated.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import PoolLimits
from backend_service.request import Ended, Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.scheduling.priority import DEFAULT_PROMOTE_AFTER_S, InteractiveFirst
from backend_service.scheduling.registry import POLICY_NAMES, make_policy
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from service_kit.requests import Priority, Sampling
from simulator.clock import VirtualClock

SPEED = SimulatedSpeed(170, {1: 0.012, 2: 0.023, 4: 0.037, 8: 0.065})
"""SmolLM2-135M on one core, as benchmarks/llama_steps.py measures it."""
BATCH = 4
KV_TOKENS = 16_384
STEPS = StepLimits(step_tokens=25, step_target_s=0.15)
"""What a backend makes of such a speed."""
LOAD = 0.8
EARLY_PROMOTION_S = 30.0
"""For the second try of the priority policy: less than the backlog takes."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come. Its prompt shares nothing with another one's."""

    at_s: float
    kind: str
    prompt_tokens: int
    new_tokens: int
    priority: Priority = Priority.INTERACTIVE


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it."""

    kind: str
    ttft_s: float
    """From its arrival."""
    ended_at_s: float
    """From the start of the scenario."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A policy as a backend is told it."""

    name: str
    promote_after_s: float = DEFAULT_PROMOTE_AFTER_S

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.name}, {self.promote_after_s:.0f} s" if self.name == InteractiveFirst.name else self.name


def rules(arrivals: Sequence[Arrival]) -> list[Rule]:
    """Those that differ for these arrivals: without a batch request among them, priority is fcfs."""
    if any(arrival.priority is Priority.BATCH for arrival in arrivals):
        return [*map(Rule, POLICY_NAMES), Rule(InteractiveFirst.name, EARLY_PROMOTION_S)]
    return [Rule(name) for name in POLICY_NAMES if name != InteractiveFirst.name]


def head_of_line(rng: random.Random, *, small: bool) -> list[Arrival]:
    """A full batch decodes; a long prompt joins the line, then short ones, 50 ms apart."""
    long_tokens, shorts = (1000, 8) if small else (2000, 12)
    running = [Arrival(0.0, "running", 64, 80 + 20 * index) for index in range(BATCH)]
    waiting = [Arrival(3.0 + 0.05 * index, "short", 48, 32) for index in range(1, shorts + 1)]
    return [*running, Arrival(3.0, "long", long_tokens, 32), *waiting]


def mixed(rng: random.Random, *, small: bool) -> list[Arrival]:
    """Arrivals at random (Poisson), one in four long, at 0.8 of what the engine can do."""
    kinds = {"long": (1500, 32, 1), "short": (60, 64, 3)}
    weights = [weight for _, _, weight in kinds.values()]
    mean_s = sum(work_s(prompt, new) * weight for prompt, new, weight in kinds.values()) / sum(weights) / LOAD
    at_s, arrivals = 0.0, []
    for kind in rng.choices(list(kinds), weights, k=40 if small else 400):
        at_s += rng.expovariate(1 / mean_s)
        arrivals.append(Arrival(at_s, kind, *kinds[kind][:2]))
    return arrivals


def backlog(rng: random.Random, *, small: bool) -> list[Arrival]:
    """Batch requests at once; interactive ones come one by one, until the batch requests alone would be done."""
    batches = 12 if small else 32
    batch = [Arrival(0.0, "batch", 300, 64, Priority.BATCH) for _ in range(batches)]
    at_s, interactive = 1.0, []
    while at_s < batches * work_s(300, 64):
        interactive.append(Arrival(at_s, "interactive", 60, 48))
        at_s += rng.expovariate(1 / 4)
    return [*batch, *interactive]


SCENARIOS: dict[str, Callable[..., list[Arrival]]] = {"head_of_line": head_of_line, "mixed": mixed, "backlog": backlog}
"""From a random generator and `small`, which is for engines that take real time."""


def work_s(prompt_tokens: int, new_tokens: int) -> float:
    """The engine's time for one request in a full batch."""
    return prompt_tokens / SPEED.prefill_tokens_per_s + new_tokens * SPEED.step_s(BATCH) / BATCH


def prompt(index: int, count: int, vocabulary: range) -> list[int]:
    """Token ids, different for each index."""
    return random.Random(index).choices(vocabulary, k=count)


def simulate(arrivals: Sequence[Arrival], rule: Rule, *, max_active: int = BATCH) -> list[Outcome]:
    """Arrivals are taken in between two steps, as the real backend does."""
    clock = VirtualClock()
    engine = SimulatedEngine(SPEED, PoolLimits(KV_TOKENS, max_live=max_active), sleep=clock.sleep)
    policy = make_policy(
        rule.name,
        prefill_tokens_per_s=SPEED.prefill_tokens_per_s,
        decode_tokens_per_s=SPEED.rates().decode_tokens_per_s,
        promote_after_s=rule.promote_after_s,
    )
    scheduler = Scheduler(engine, SchedulerLimits(max_active, STEPS), clock=clock, policy=policy)
    coming = deque(sorted(enumerate(arrivals), key=lambda each: each[1].at_s))
    outcomes = []
    while coming or scheduler.busy:
        if not scheduler.busy:
            clock.now_s = max(clock.now_s, coming[0][1].at_s)
        while coming and coming[0][1].at_s <= clock.now_s:
            scheduler.submit(_request(*coming.popleft(), engine))
        for event in scheduler.tick():
            if isinstance(event, Ended):
                times, arrival = event.times, arrivals[int(event.request_id)]
                outcomes.append(Outcome(arrival.kind, times.first_token_s - times.submitted_s, times.last_token_s))
    return outcomes


def _request(index: int, arrival: Arrival, engine: SimulatedEngine) -> Request:
    vocabulary = engine.info.vocabulary
    return Request(
        id=str(index),
        tokens=prompt(index, arrival.prompt_tokens, range(256)),
        max_new_tokens=arrival.new_tokens,
        sampling=Sampling(),
        ignore_eos=True,
        text=TextStream(vocabulary.pieces, ()),
        eos=vocabulary.eos,
        reusable_estimate=0,
        submitted_s=arrival.at_s,
        priority=arrival.priority,
    )
