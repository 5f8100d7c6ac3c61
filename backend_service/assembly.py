"""From settings to a running engine: what the engine thread builds before it serves."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import structlog

from backend_service.engines.base import Engine
from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed, parse_decode_steps
from backend_service.kv_pool import PoolLimits
from backend_service.profile import Calibration, Profile, ProfileStore
from backend_service.runner import Assembly
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.scheduling.base import QueuePolicy
from backend_service.scheduling.registry import make_policy
from backend_service.settings import BackendSettings, parse_cpus
from backend_service.step_model import IsolatedRates, StepFit
from backend_service.step_plan import StepLimits
from service_kit.faults import StartupFailed

if TYPE_CHECKING:
    from backend_service.engines.llama_cpp import LlamaConfig
    from backend_service.engines.llama_model import LlamaModel
    from backend_service.speculation.base import Proposer

_log = structlog.get_logger(__name__)
_SIMULATED_STEP_TOKENS = 512
_SIMULATED_TOKEN_BYTES = 24_000
"""What a token is taken to need in host memory; about that of a model with 135M parameters."""


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
    """Load the engine, measure it or recall the measurement, and put a scheduler on it. Raises `StartupFailed`.

    Called on the engine's thread, which is pinned here: the event loop goes wherever there is room, so that a probe
    need not wait for a core that computes.
    """
    pin(settings.cpus)
    if settings.engine == "simulated":
        simulated, speed = _simulated(settings)
        limits = _limits(settings, settings.step_tokens or _SIMULATED_STEP_TOKENS)
        rates = speed.rates()
        return Assembly(simulated, Scheduler(simulated, limits, policy=_policy(settings, rates)), rates)
    engine = _llama(settings)
    profile = _profile(engine, settings)
    fit = StepFit()
    for shape, seconds in profile.steps:
        fit.observe(shape, seconds)
    limits = _limits(
        settings, max(settings.max_active, settings.step_tokens or _step_tokens(settings, engine, profile))
    )
    policy = _policy(settings, profile.rates)
    return Assembly(engine, Scheduler(engine, limits, fit=fit, policy=policy), profile.rates)


def _step_tokens(settings: BackendSettings, engine: Engine, profile: Profile) -> int:
    """The bound where none is set: the target time is enough of one, as the step model knows from the start what it
    allows, and learns. Without a target it is what was prefilled in `STEP_TARGET_S` when the engine was measured."""
    return engine.info.max_step_tokens if settings.step_target_ms else profile.step_tokens


def _policy(settings: BackendSettings, rates: IsolatedRates) -> QueuePolicy:
    return make_policy(
        settings.scheduling,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        promote_after_s=settings.promote_batch_after_s,
    )


def _limits(settings: BackendSettings, step_tokens: int) -> SchedulerLimits:
    guesses = 0 if settings.speculate == "off" else settings.guesses
    step = StepLimits(step_tokens, (settings.step_target_ms / 1000) or None, guesses)
    return SchedulerLimits(settings.max_active, step, settings.prefix_wait_s)


def _simulated(settings: BackendSettings) -> tuple[SimulatedEngine, SimulatedSpeed]:
    speed = SimulatedSpeed(
        settings.simulated_prefill_rate,
        parse_decode_steps(settings.simulated_decode_ms),
        settings.simulated_decode_rate or None,
    )
    limits = _pool_limits(settings, host_tokens=settings.host_cache_mb * 2**20 // _SIMULATED_TOKEN_BYTES)
    return SimulatedEngine(speed, limits, model_name=settings.model_name or "simulated"), speed


def _llama(settings: BackendSettings) -> Engine:
    try:
        from backend_service.engines.llama_cpp import LlamaConfig, LlamaCppEngine
        from backend_service.engines.llama_model import LlamaModel
    except ImportError as error:
        raise StartupFailed(
            f'The llama.cpp engine is not installed ({error}): pip install "phaseroute[llama]".'
        ) from error
    from backend_service.models import locate_model

    started_s = time.monotonic()
    model = LlamaModel(locate_model(settings.model), n_gpu_layers=settings.n_gpu_layers, name=settings.model_name)
    config = LlamaConfig(
        _pool_limits(settings),
        settings.threads,
        settings.kv_type,
        flash_attention=settings.flash_attention == "on",
        cpu_only=settings.n_gpu_layers == 0,
        host_bytes=settings.host_cache_mb * 2**20,
        device=describe_device(settings),
    )
    engine = LlamaCppEngine(model, config, _proposer(settings, model, config))
    _log.info("model loaded", model=model.name, seconds=round(time.monotonic() - started_s, 2))
    return engine


def _proposer(settings: BackendSettings, target: LlamaModel, config: LlamaConfig) -> Proposer | None:
    """Who guesses tokens ahead. How many is left to experience: wrong guesses cost as much as right ones."""
    if settings.speculate == "off":
        return None
    from backend_service.engines.llama_draft import LlamaDraft
    from backend_service.engines.llama_model import LlamaModel
    from backend_service.models import locate_model
    from backend_service.speculation.adaptive import AdaptiveProposer
    from backend_service.speculation.prompt_lookup import PromptLookup

    if settings.speculate == "prompt_lookup":
        return AdaptiveProposer(PromptLookup())
    draft = LlamaModel(locate_model(settings.draft_model), n_gpu_layers=settings.n_gpu_layers)
    return AdaptiveProposer(LlamaDraft(draft, target, config))


def _profile(engine: Engine, settings: BackendSettings) -> Profile:
    store = ProfileStore(settings.profile_dir)
    info = engine.info
    key = (
        f"{info.model_fingerprint} {info.name} {info.device} kv={settings.kv_tokens}:{settings.kv_type} "
        f"flash={settings.flash_attention} "
        f"active={settings.max_active} step={settings.step_tokens}"
    )
    profile = None if settings.measure else store.load(key)
    if profile is None:
        profile = Calibration(
            engine, max_active=settings.max_active, step_tokens=settings.step_tokens, clock=time.monotonic
        ).run()
        try:
            store.save(key, profile)
        except OSError as error:
            _log.warning("measured rates not saved: every start measures anew", error=str(error))
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


def describe_device(settings: BackendSettings) -> str:
    """The device in words, for Status and as part of a profile's key."""
    if settings.n_gpu_layers:
        layers = "all" if settings.n_gpu_layers < 0 else str(settings.n_gpu_layers)
        return f"GPU ({layers} layers) and CPU, {settings.threads} threads"
    threads = f"{settings.threads} thread{'s' if settings.threads > 1 else ''}"
    return ", ".join(filter(None, ("CPU", threads, settings.cpus and f"cpus {settings.cpus}", _kv(settings))))


def _kv(settings: BackendSettings) -> str:
    return "" if settings.kv_type == "f16" else f"{settings.kv_type} KV"


def _pool_limits(settings: BackendSettings, *, host_tokens: int = 0) -> PoolLimits:
    return PoolLimits(
        settings.kv_tokens,
        max_live=settings.max_active,
        retained_tokens=settings.retained_tokens,
        host_tokens=host_tokens,
    )
