"""From settings to a running engine: what the engine thread builds before it serves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import structlog

from backend_service.concurrency import Concurrency
from backend_service.engines.base import Engine
from backend_service.loading import load_llama, load_mlx, load_simulated
from backend_service.profile import Calibration, Profile, ProfileStore, step_target_s
from backend_service.runner import Assembly
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.scheduling.base import QueuePolicy
from backend_service.scheduling.registry import make_policy
from backend_service.settings import BackendSettings, parse_cpus
from backend_service.step_model import IsolatedRates, StepFit
from backend_service.step_plan import StepLimits
from service_kit.faults import LoadFailed, StartupFailed
from service_kit.step_time import StepShape

_log = structlog.get_logger(__name__)
_SIMULATED_STEP_TOKENS = 512


def pin(cpus: str) -> None:
    """Keep the calling thread, and the threads it will start, on these cores. Raises `StartupFailed`."""
    wanted = parse_cpus(cpus)
    if not wanted:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise StartupFailed("--cpus cannot be used on this system; leave it out.")
    available = os.sched_getaffinity(0)
    if not wanted <= available:
        raise StartupFailed(
            f"--cpus {cpus} names cores that are not here; available are "
            f"{', '.join(str(cpu) for cpu in sorted(available))}."
        )
    os.sched_setaffinity(0, wanted)


def assemble(settings: BackendSettings) -> Assembly:
    """Load the engine, measure it or recall the measurement, and put a scheduler on it. Raises `StartupFailed`, and as
    `LoadFailed` what is wrong with the model or its engine.

    Called on the engine's thread, which is pinned here: the event loop goes wherever there is room, so that a probe
    need not wait for a core that computes.
    """
    pin(settings.cpus)
    if settings.engine == "simulated":
        simulated, speed = load_simulated(settings)
        rates = speed.rates()
        limits = _limits(settings, rates, settings.step_tokens or _SIMULATED_STEP_TOKENS)
        steps = speed.samples(limits.max_active, limits.step.step_tokens)
        return _assembly(settings, simulated, rates, limits, _seeded(steps, measured_s=time.monotonic()))
    try:
        engine = load_llama(settings) if settings.engine == "llama_cpp" else load_mlx(settings)
    except StartupFailed as failure:
        raise LoadFailed(str(failure)) from failure
    profile = _profile(engine, settings)
    fit = _seeded(profile.steps, measured_s=time.monotonic() - max(0.0, time.time() - profile.measured_at))
    step_tokens = settings.step_tokens or _step_tokens(settings, engine, profile)
    limits = _limits(settings, profile.rates, max(settings.largest_batch, step_tokens))
    return _assembly(settings, engine, profile.rates, limits, fit)


def _assembly(
    settings: BackendSettings, engine: Engine, rates: IsolatedRates, limits: SchedulerLimits, fit: StepFit
) -> Assembly:
    concurrency = None
    if settings.max_active == "auto":
        target_ms = settings.inter_token_target_ms
        concurrency = Concurrency(limits.max_active, None if target_ms is None else target_ms / 1000)
    scheduler = Scheduler(engine, limits, fit=fit, policy=_policy(settings, rates), concurrency=concurrency)
    return Assembly(engine, scheduler, rates)


def _seeded(steps: Iterable[tuple[StepShape, float]], *, measured_s: float) -> StepFit:
    """A fit that knows these steps from the start; `measured_s` on the scheduler's clock."""
    fit = StepFit()
    for shape, seconds in steps:
        fit.seed(shape, seconds, measured_s)
    return fit


def _step_tokens(settings: BackendSettings, engine: Engine, profile: Profile) -> int:
    """The bound where none is set: the target time is enough of one, as the step model knows from the start what it
    allows, and learns. Without a target it is what was prefilled in that time when the engine was measured."""
    return profile.step_tokens if settings.step_target_ms == 0 else engine.info.max_step_tokens


def _policy(settings: BackendSettings, rates: IsolatedRates) -> QueuePolicy:
    return make_policy(
        settings.scheduling,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_tokens_per_s=rates.decode_tokens_per_s,
        promote_after_s=settings.promote_batch_after_s,
    )


def _limits(settings: BackendSettings, rates: IsolatedRates, step_tokens: int) -> SchedulerLimits:
    guesses = 0 if settings.speculate == "off" else settings.guesses
    if settings.step_target_ms is None:
        target_s: float | None = step_target_s(rates.decode_tokens_per_s)
    else:
        target_s = settings.step_target_ms / 1000 or None
    return SchedulerLimits(settings.largest_batch, StepLimits(step_tokens, target_s, guesses), settings.prefix_wait_s)


def _profile(engine: Engine, settings: BackendSettings) -> Profile:
    store = ProfileStore(settings.profile_dir)
    info = engine.info
    key = (
        f"{info.model_fingerprint} {info.precision} {info.name} {info.device} "
        f"kv={settings.kv_tokens}:{settings.kv_type} flash={settings.flash_attention} "
        f"active={settings.largest_batch} step={settings.step_tokens}"
    )
    profile = None if settings.measure else store.load(key)
    if profile is None:
        begun_s = time.monotonic()
        profile = Calibration(
            engine, max_active=settings.largest_batch, step_tokens=settings.step_tokens, clock=time.monotonic
        ).run()
        _log.info("calibrated", seconds=round(time.monotonic() - begun_s, 2), steps=len(profile.steps))
        store.save(key, profile)
        source = "measured"
    else:
        source = "saved; --measure for new ones"
    _log.info(
        "isolated rates",
        source=source,
        prefill_tokens_per_s=round(profile.rates.prefill_tokens_per_s, 1),
        decode_tokens_per_s=round(profile.rates.decode_tokens_per_s, 1),
        step_tokens=profile.step_tokens,
    )
    return profile
