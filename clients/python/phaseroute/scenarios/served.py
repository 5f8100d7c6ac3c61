"""What became of a scenario's requests, in virtual time or for real: what tables, plots and reports are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request's outcome. Seconds from its arrival unless said otherwise."""

    index: int
    """In the scenario."""
    arrived_s: float
    """Since the start of the scenario."""
    code: str
    """A gRPC status code's name: "OK", "RESOURCE_EXHAUSTED", ... The times below are meaningful for "OK" only."""
    backend: str
    """Where it ran, "" if nowhere."""
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    workload: str = ""
    ttft_s: float = 0.0
    finish_s: float = 0.0
    predicted_ttft_s: float | None = None
    predicted_finish_s: float | None = None
    """None where the policy predicts nothing."""
    gaps_s: tuple[float, ...] = ()
    """Inter-token latencies, where they were recorded."""

    @property
    def ok(self) -> bool:
        """It was answered in full."""
        return self.code == "OK"

    @property
    def finish_error(self) -> float | None:
        """(predicted - actual) / actual time to finish; None without a prediction or an answer."""
        if self.predicted_finish_s is None or not self.ok or self.finish_s <= 0:
            return None
        return (self.predicted_finish_s - self.finish_s) / self.finish_s


@dataclass(frozen=True, slots=True)
class Run:
    """One play of a scenario under one policy."""

    scenario: str
    policy: str
    run: int
    """Counts from 0; runs of equal number have equal arrivals."""
    backends: tuple[str, ...]
    simulated: bool
    served: tuple[Served, ...]
    """In order of arrival."""

    @property
    def completion_s(self) -> float:
        """From the first arrival to the end of the last answer; 0 without answers."""
        ends = [item.arrived_s + item.finish_s for item in self.served if item.ok]
        return max(ends) - min(item.arrived_s for item in self.served) if ends else 0.0
