"""The CPU-offload experiment that phaseroute grew from, as a simulation.

Published: the profile (prefill and decode rates of one request alone) and the workload: bursts of requests 50 ms apart,
516-token prompts of which 496 are a warm shared prefix, exactly 128 tokens each, at most 4 active a backend. Worked out
from the published times, of the GPU: a decode step of 4 rows from the eighth request of a burst of 8, first token to
last; of 3 rows from what the mixed burst took after the moment at which that first token had come; alone from its rate.
Of the CPU: a step alone from the eighth request of the mixed burst. Assumed: a GPU's step of 2 rows lies between those
of 1 and 3; each further row of a CPU's batch takes what a token of a prompt does, as it is one more column in the same
products. `PROPORTIONAL_CPU` is the careful assumption: that a CPU gains nothing from a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend_service.engines.simulated import SimulatedSpeed
from phaseroute.scenarios.planned import Planned, Scenario
from phaseroute.scenarios.served import Run
from simulator.play import PlayOptions, play
from simulator.profiles import Profile
from simulator.router import Routed

PREFIX_TOKENS = 496
PROMPT_TOKENS = 516
NEW_TOKENS = 128
GAP_S = 0.05

_EIGHTH_ARRIVED_S = 7 * GAP_S
_EIGHTH_TTFT_S, _EIGHTH_END_S = 5.561, 11.116
"""Of the eighth request on the GPU, since it arrived."""
_MIXED_WALL_S = 10.361
"""Of the same run's mixed burst, in which three requests followed the first four."""
_EIGHTH_MIXED_TTFT_S, _EIGHTH_MIXED_END_S = 0.339, 3.681
"""On the CPU, alone there."""
_STEPS = NEW_TOKENS - 1

GPU_DECODE_STEP_S = {
    1: 1 / 293,
    3: (_MIXED_WALL_S - _EIGHTH_ARRIVED_S - _EIGHTH_TTFT_S) / _STEPS,
    4: (_EIGHTH_END_S - _EIGHTH_TTFT_S) / _STEPS,
}
_CPU_STEP_S = (_EIGHTH_MIXED_END_S - _EIGHTH_MIXED_TTFT_S) / _STEPS
CPU_PREFILL_TOKENS_PER_S = 73
CPU_DECODE_STEP_S = {1: _CPU_STEP_S, 2: _CPU_STEP_S + 1 / CPU_PREFILL_TOKENS_PER_S}

BACKENDS = {
    "cpu": Profile(SimulatedSpeed(CPU_PREFILL_TOKENS_PER_S, CPU_DECODE_STEP_S, reported_decode_tokens_per_s=45)),
    "gpu": Profile(SimulatedSpeed(2551, GPU_DECODE_STEP_S, reported_decode_tokens_per_s=293)),
}
PROPORTIONAL_CPU = Profile(
    SimulatedSpeed(CPU_PREFILL_TOKENS_PER_S, {1: _CPU_STEP_S, 2: 2 * _CPU_STEP_S}, reported_decode_tokens_per_s=45)
)


@dataclass(frozen=True, slots=True)
class BurstResult:
    """One burst under one policy. Simulated."""

    run: Run
    decisions: tuple[Routed, ...]
    """With all candidates, in order of arrival."""

    @property
    def policy(self) -> str:
        """Its name."""
        return self.run.policy

    @property
    def completion_s(self) -> float:
        """From the first arrival to the last token."""
        return self.run.completion_s

    def sent_to(self, backend: str) -> int:
        """Requests that this backend got."""
        return sum(served.backend == backend for served in self.run.served)


def burst(requests: int) -> Scenario:
    """The article's workload."""
    return Scenario(
        name=f"article {requests}",
        description=f"{requests} requests, {GAP_S * 1000:.0f} ms apart, on a warm prefix",
        requests=tuple(
            Planned(
                at_s=index * GAP_S,
                prompt_tokens=PROMPT_TOKENS,
                prefix=0,
                prefix_tokens=PREFIX_TOKENS,
                max_new_tokens=NEW_TOKENS,
                new_tokens=NEW_TOKENS,
            )
            for index in range(requests)
        ),
        warm=(0,),
    )


def run_burst(requests: int, policy: str, *, seed: int = 0) -> BurstResult:
    """Both backends warm, then the burst."""
    played = play(burst(requests), BACKENDS, PlayOptions(policy=policy, seed=seed, keep_decisions=True))
    return BurstResult(played.run, played.decisions)
