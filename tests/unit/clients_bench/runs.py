"""Runs made by hand."""

from __future__ import annotations

from phaseroute.scenarios.served import Run, Served


def served(index: int, backend: str = "gpu", **changes) -> Served:
    """An answer: first token after 1 s, the end after 2 s, unless said otherwise."""
    values = {
        "index": index, "arrived_s": 0.0, "code": "OK", "backend": backend, "prompt_tokens": 100, "cached_tokens": 40,
        "new_tokens": 10, "ttft_s": 1.0, "finish_s": 2.0,
    }  # fmt: skip
    return Served(**{**values, **changes})


def lost(index: int, code: str = "UNAVAILABLE", **changes) -> Served:
    """No answer."""
    return served(index, "", **{"code": code, "ttft_s": 0.0, "finish_s": 0.0, "new_tokens": 0, **changes})


def run_of(
    *items: Served, scenario: str = "s", policy: str = "p", run: int = 0, backends: tuple[str, ...] = ("cpu", "gpu"),
    simulated: bool = False,
) -> Run:  # fmt: skip
    return Run(scenario, policy, run, backends, simulated, items)
