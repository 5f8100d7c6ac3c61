"""From settings to a loaded engine, one function an engine. Their modules are imported only when they are wanted."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from backend_service.engines.base import Engine, Slice
from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed, parse_decode_steps
from backend_service.kv_pool import PoolLimits
from backend_service.settings import BackendSettings
from service_kit.faults import StartupFailed
from service_kit.requests import Sampling

if TYPE_CHECKING:
    from backend_service.engines.llama_cpp import LlamaConfig
    from backend_service.engines.llama_model import LlamaModel
    from backend_service.engines.mlx_blas import Blas
    from backend_service.speculation.base import Proposer

_log = structlog.get_logger(__name__)
_LLAMA_RETAINED_TOKENS = 512
_MLX_RETAINED_SEQUENCES = 64
"""Released sequences that may stay; they cost a step nothing."""
_SIMULATED_TOKEN_BYTES = 24_000
"""What a token is taken to need in host memory; about that of a model with 135M parameters."""
_WARM_UP_TOKENS = 24


def load_simulated(settings: BackendSettings) -> tuple[SimulatedEngine, SimulatedSpeed]:
    """An engine that takes as long as it is told to. Raises `StartupFailed`."""
    speed = SimulatedSpeed(
        settings.simulated_prefill_rate,
        parse_decode_steps(settings.simulated_decode_ms),
        settings.simulated_decode_rate or None,
    )
    limits = _pool_limits(
        settings, _LLAMA_RETAINED_TOKENS, host_tokens=settings.host_cache_mb * 2**20 // _SIMULATED_TOKEN_BYTES
    )
    return SimulatedEngine(speed, limits, model_name=settings.model_name or "simulated"), speed


def load_llama(settings: BackendSettings) -> Engine:
    """llama.cpp with its model. Raises `StartupFailed`."""
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
        _pool_limits(settings, _LLAMA_RETAINED_TOKENS),
        settings.threads,
        settings.kv_type,
        flash_attention=settings.flash_attention == "on",
        cpu_only=settings.n_gpu_layers == 0,
        host_bytes=settings.host_cache_mb * 2**20,
        device=describe_llama_device(settings),
    )
    engine = LlamaCppEngine(model, config, _proposer(settings, model, config))
    _log_loaded(engine, started_s)
    return engine


def load_mlx(settings: BackendSettings) -> Engine:
    """MLX with its model, on the calling thread, which is the only one to use it from then on. Raises
    `StartupFailed`."""
    from backend_service.engines.mlx_blas import prepare_blas
    from backend_service.engines.mlx_install import require_mlx

    started_s = time.monotonic()
    blas = prepare_blas(settings.threads, device=settings.device)  # before MLX is imported for the first time
    require_mlx()
    from backend_service.engines.mlx_model import MlxModel
    from backend_service.models import locate_mlx_model

    model = MlxModel(
        locate_mlx_model(settings.model),
        cache=settings.converted_dir,
        weights=settings.weights,
        device=settings.device,
        name=settings.model_name,
        kv_tokens=settings.kv_tokens,
    )
    from backend_service.engines.mlx_lm import MlxConfig, MlxEngine

    engine = MlxEngine(
        model,
        MlxConfig(
            replace(_pool_limits(settings, settings.kv_tokens), max_retained=_MLX_RETAINED_SEQUENCES),
            run_ahead=model.device == "gpu",
            device=describe_mlx_device(settings, model.device_name, blas),
        ),
    )
    _warm_up(engine)
    engine.clear_cache()
    _log_loaded(engine, started_s)
    return engine


def describe_llama_device(settings: BackendSettings) -> str:
    """The device in words, for Status and as part of a profile's key."""
    if settings.n_gpu_layers:
        layers = "all" if settings.n_gpu_layers < 0 else str(settings.n_gpu_layers)
        return f"GPU ({layers} layers) and CPU, {settings.threads} threads"
    kv = "" if settings.kv_type == "f16" else f"{settings.kv_type} KV"
    return ", ".join(filter(None, ("CPU", *_cpu(settings), kv)))


def describe_mlx_device(settings: BackendSettings, name: str, blas: Blas) -> str:
    """The same for MLX; `name` is empty for a CPU, else the GPU's own."""
    return name or ", ".join(filter(None, ("CPU", *_cpu(settings), blas.name)))


def _cpu(settings: BackendSettings) -> tuple[str, str]:
    threads = f"{settings.threads} thread{'s' if settings.threads > 1 else ''}"
    return threads, settings.cpus and f"cpus {settings.cpus}"


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


def _warm_up(engine: Engine) -> None:
    """A prompt and two tokens: a GPU compiles its kernels at their first use, which no request should wait for."""
    prompt = list(range(_WARM_UP_TOKENS))
    admission = engine.admit(prompt, 3, Sampling(), ignore_eos=True)
    if admission is None:
        raise StartupFailed("The KV cache is too small for a single short request; raise --kv-tokens.")
    for tokens in (len(prompt), 1, 1):
        engine.step([Slice(admission.handle, tokens)])
    engine.release(admission.handle, retain=False)


def _pool_limits(settings: BackendSettings, retained_tokens: int, *, host_tokens: int = 0) -> PoolLimits:
    """`retained_tokens`: where the settings leave it to the engine."""
    return PoolLimits(
        settings.kv_tokens,
        max_live=settings.largest_batch,
        retained_tokens=retained_tokens if settings.retained_tokens is None else settings.retained_tokens,
        host_tokens=host_tokens,
    )


def _log_loaded(engine: Engine, started_s: float) -> None:
    info = engine.info
    _log.info(
        "model loaded",
        model=info.model_name,
        precision=info.precision,
        device=info.device,
        seconds=round(time.monotonic() - started_s, 2),
    )
