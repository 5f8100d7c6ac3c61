"""The CPU-offload experiment that phaseroute grew from, as a simulation.

Published: the profile (prefill and decode rates of one request alone) and the workload: bursts of requests 50 ms apart,
516-token prompts of which 496 are a warm shared prefix, exactly 128 tokens each, at most 4 active a backend. Worked out
from the published completion times: the GPU's decode steps at batch 3 and 4 (36 and 43 ms, against 3.4 ms alone) and
the CPU's alone (26.1 ms). Assumed: a CPU's step grows in proportion to its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend_service.engines.simulated import SimulatedSpeed
from simulator.fleet import Arrival, BackendModel, Outcome, VirtualFleet

PREFIX_TOKENS = 496
PROMPT_TOKENS = 516
NEW_TOKENS = 128
GAP_S = 0.05
GPU_DECODE_STEP_S = {1: 0.00341, 3: 0.036, 4: 0.043}
CPU_DECODE_STEP_S = {1: 0.0261, 2: 0.0522}

BACKENDS = {
    "cpu": BackendModel(SimulatedSpeed(73, CPU_DECODE_STEP_S, reported_decode_tokens_per_s=45)),
    "gpu": BackendModel(SimulatedSpeed(2551, GPU_DECODE_STEP_S, reported_decode_tokens_per_s=293)),
}


@dataclass(frozen=True, slots=True)
class BurstResult:
    """One burst under one policy. Simulated."""

    policy: str
    outcomes: tuple[Outcome, ...]

    @property
    def completion_s(self) -> float:
        """From the first arrival to the last token."""
        return max(outcome.arrived_s + outcome.finish_s for outcome in self.outcomes)

    def sent_to(self, backend: str) -> int:
        """Requests that this backend got."""
        return sum(outcome.backend == backend for outcome in self.outcomes)


def prompt(index: int) -> tuple[int, ...]:
    """The shared prefix and a suffix that is this request's own."""
    prefix = [(position * 7) % 251 for position in range(PREFIX_TOKENS)]
    suffix = [index % 256, index // 256, *(position % 199 for position in range(PROMPT_TOKENS - PREFIX_TOKENS - 2))]
    return (*prefix, *suffix)


def burst(requests: int) -> list[Arrival]:
    """The article's workload."""
    return [Arrival(index * GAP_S, prompt(index), NEW_TOKENS) for index in range(requests)]


def run_burst(requests: int, policy: str) -> BurstResult:
    """Both backends warm, then the burst."""
    fleet = VirtualFleet(BACKENDS, policy=policy)
    fleet.warm(prompt(0)[:PREFIX_TOKENS])
    return BurstResult(policy, tuple(fleet.run(burst(requests))))
