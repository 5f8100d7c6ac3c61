"""Backends to simulate: the article's pair, devices that were measured, and fleets of them. All of it is simulated."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from backend_service.engines.simulated import ModelSpeed, SimulatedSpeed, Speed
from backend_service.step_model import IsolatedRates
from service_kit.step_time import StepModel
from simulator.article import BACKENDS
from simulator.profiles import BadProfile, Profile

WIDE_PREFIX = "wide:"
MOST_BACKENDS = 10_000
WIDE_KINDS = 20
WIDE_SPREAD = 2.0
"""A kind in a wide fleet is up to so many times as fast as its device, or as slow."""


def _between() -> SimulatedSpeed:
    """The geometric mean of the article's two devices, figure by figure: as many times faster than the CPU as it is
    slower than the GPU, in prefill and at every batch size, so that its balance of both lies between theirs, too."""
    cpu, gpu = BACKENDS["cpu"].speed, BACKENDS["gpu"].speed
    assert isinstance(cpu, SimulatedSpeed)
    assert isinstance(gpu, SimulatedSpeed)
    return SimulatedSpeed(
        (cpu.prefill_tokens_per_s * gpu.prefill_tokens_per_s) ** 0.5,
        {rows: (cpu.step_s(rows) * gpu.step_s(rows)) ** 0.5 for rows in (1, 2, 3, 4)},
    )


DEVICES: Mapping[str, Profile] = {
    "cpu": replace(BACKENDS["cpu"], source="the article's CPU, an Apple M2's"),
    "gpu": replace(BACKENDS["gpu"], source="the article's GPU, an Apple M2's"),
    "npu": Profile(_between(), source="made up: the geometric mean of the article's two in every figure"),
    # docs/measurements.md, "llama.cpp on one core", f16. Decode of 1 and of 4 rows at 64 tokens of context takes 12.5
    # and 41.8 ms; 436 and 1,436 tokens more add about 10 us each a row; a chunk of 256 runs at 126 tokens/s.
    "llama": Profile(
        ModelSpeed(StepModel(2.7e-3, 6.7e-3, 2.4e-3, 1.0e-5, 0, 0.0), IsolatedRates(108, 80)),
        kv_tokens=8192,
        step_target_s=0.15,
        source="llama.cpp on one CPU core, SmolLM2-135M Q4_1, as in docs/measurements.md",
    ),
    # docs/mlx.md. Decode of 1, 2, 4 and 8 rows takes 138, 144, 174 and 226 ms, which is 124 ms and 12.5 ms a row, 9 %
    # off at most; 64 tokens of prefill at 180 tokens/s. What a longer context adds is unknown and counts as nothing.
    "mlx": Profile(
        ModelSpeed(StepModel(0.124, 3.6e-3, 8.9e-3, 0.0, 0, 0.0), IsolatedRates(180, 7.2)),
        kv_tokens=8192,
        step_target_s=0.552,
        source="MLX on one CPU core, SmolLM2-135M in float32, as in docs/mlx.md",
    ),
    # docs/gpu.md, requests at once on the GPU alone, and its rates as calibrated.
    "h200": Profile(
        SimulatedSpeed(
            1370, {1: 0.0055, 2: 0.0079, 4: 0.0074, 8: 0.0075, 16: 0.0076, 32: 0.0080}, reported_decode_tokens_per_s=207
        ),
        max_active=32,
        kv_tokens=32_768,
        source="MLX on an H200, SmolLM2-135M in bfloat16, as in docs/gpu.md",
    ),
}

FLEETS: Mapping[str, tuple[str, ...]] = {
    "article": ("cpu", "gpu"),
    "article3": ("cpu", "npu", "gpu"),
    "mixed": ("llama", "mlx"),
    "h200": ("llama", "h200"),
}
"""Devices by the fleet's name; a backend is called as its device."""

_WIDE_DEVICES = ("cpu", "npu", "gpu", "llama", "h200")


def fleet(name: str, *, seed: int = 0) -> dict[str, Profile]:
    """Backends by name: one of `FLEETS`, or "wide:N" for N backends of `WIDE_KINDS` kinds drawn by the seed. Raises
    `BadProfile` that lists what there is."""
    if name in FLEETS:
        return {device: DEVICES[device] for device in FLEETS[name]}
    count = name.removeprefix(WIDE_PREFIX)
    if count == name:
        raise BadProfile(f"{name!r} is no fleet; use one of {', '.join(FLEETS)}, {WIDE_PREFIX}N")
    if not (count.isdecimal() and 1 <= int(count) <= MOST_BACKENDS):
        raise BadProfile(f"{name!r} is no fleet; give {WIDE_PREFIX}1 to {WIDE_PREFIX}{MOST_BACKENDS}")
    return _wide(int(count), random.Random(seed))


def scaled(profile: Profile, times: float) -> Profile:
    """The same device, `times` as fast in everything."""
    return replace(profile, speed=_scaled(profile.speed, times), source=f"{profile.source}, {times:.2g} times as fast")


def _scaled(speed: Speed, times: float) -> Speed:
    match speed:
        case SimulatedSpeed(prefill, steps, decode):
            return SimulatedSpeed(
                prefill * times, {rows: step_s / times for rows, step_s in steps.items()}, decode and decode * times
            )
        case ModelSpeed(model, rates):
            return ModelSpeed(
                replace(
                    model,
                    base_s=model.base_s / times,
                    per_token_s=model.per_token_s / times,
                    per_row_s=model.per_row_s / times,
                    per_attended_s=model.per_attended_s / times,
                    row_corrections_s=tuple((rows, more_s / times) for rows, more_s in model.row_corrections_s),
                ),
                IsolatedRates(rates.prefill_tokens_per_s * times, rates.decode_tokens_per_s * times),
            )
    raise TypeError(f"a speed of type {type(speed).__name__} cannot be scaled; use a table or a step model")


def _wide(count: int, rng: random.Random) -> dict[str, Profile]:
    """Few kinds, so that a step model is fitted once for many backends; each about as often."""
    kinds = [
        (device, scaled(DEVICES[device], WIDE_SPREAD ** rng.uniform(-1, 1)))
        for device in (_WIDE_DEVICES[place % len(_WIDE_DEVICES)] for place in range(WIDE_KINDS))
    ]
    fleet: dict[str, Profile] = {}
    for place in range(count):
        device, profile = kinds[place % WIDE_KINDS]
        fleet[f"{device}-{place}"] = profile
    return fleet
