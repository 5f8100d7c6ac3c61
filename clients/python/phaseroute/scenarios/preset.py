"""What a scenario is drawn from."""

from __future__ import annotations

from dataclasses import dataclass

from phaseroute.scenarios.arrivals import Arrivals
from phaseroute.scenarios.planned import Planned, Scenario
from phaseroute.scenarios.prefixes import Prefixes, Unshared
from phaseroute.scenarios.workloads import Streams, Workload, draw_workload

_UNSHARED = Unshared()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a scenario is drawn from."""

    description: str
    requests: int
    arrivals: Arrivals
    prefixes: Prefixes = _UNSHARED
    workloads: tuple[Workload, ...]

    def draw(self, name: str, seed: int) -> Scenario:
        """The same scenario for the same seed. Arrivals, workloads, lengths and prefixes are drawn independently."""
        streams = Streams(seed)
        kinds = [draw_workload(self.workloads, streams) for _ in range(self.requests)]
        sizes = [kind.draw(streams) for kind in kinds]
        prompts = self.prefixes.share((size.prompt_tokens for size in sizes), streams.prefixes)
        times_s = self.arrivals.times(self.requests, streams.arrivals)
        return Scenario(
            name=name,
            description=self.description,
            requests=tuple(
                Planned(
                    at_s=at_s,
                    prompt_tokens=prompt.tokens,
                    prefix=prompt.prefix,
                    prefix_tokens=prompt.prefix_tokens,
                    max_new_tokens=size.max_new_tokens,
                    new_tokens=size.new_tokens,
                    workload=kind.label,
                    batch=kind.batch,
                    deadline_s=kind.deadline_s,
                    ttft_slo_s=kind.ttft_slo_s,
                )
                for at_s, kind, size, prompt in zip(times_s, kinds, sizes, prompts, strict=True)
            ),
            warm=self.prefixes.warm,
        )
