"""The engines under test."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backend_service.engines.base import Engine
from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import PoolLimits
from service_kit.requests import ChatPrompt, ChatTurn, Prompt
from tests.integration.engines.tiny_models import TINY_MODELS
from tests.integration.mlx_kit import need_mlx

if TYPE_CHECKING:
    from backend_service.engines.llama_model import LlamaModel
    from backend_service.engines.mlx_model import MlxModel

MLX_DEVICE = os.environ.get("PHASEROUTE_TEST_MLX_DEVICE", "cpu")
"""Set it to gpu to see the same on a GPU."""
HOST_TOKENS = 4096
HOST_BYTES = 256 << 20


class Lack(Enum):
    """What an engine, or the model in it, cannot do."""

    SAMPLING = "ignores sampling, seeds included"
    REUSE = "may reuse less of a prefix than it has computed, or nothing"
    HOST_TIER = "has no second cache tier in host memory"
    SHARED_CELLS = "copies what it shares, so that it counts again for each"
    EXACTNESS = "rounds differently beside others, so a draw between likely tokens may come out differently"
    RECALL = "has a model that does not understand its prompt"
    MULTIBYTE = "generates ASCII only"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Bounds of an engine's cache, as in `PoolLimits`."""

    capacity_tokens: int = 1024
    """An engine may round it up."""
    max_live: int = 4
    max_retained: int = 16
    retained_tokens: int = 1024
    host_tier: bool = False
    """With a second tier that holds everything that the tests put there."""


@dataclass(frozen=True, slots=True)
class EngineCase:
    """One engine with one model."""

    name: str
    make: Callable[[EngineOptions], Engine]
    """A fresh engine with an empty cache. It has a `check_integrity` too."""
    lacks: frozenset[Lack] = frozenset()
    ending_prompt: Prompt | None = None
    """A prompt that the model answers with a few tokens; None: look for one, it is cheap."""
    slow: bool = False
    """Milliseconds a token: tests of many requests take few of them."""

    def needs(self, *lacks: Lack) -> None:
        """Skip the calling test where the engine lacks one of these."""
        for lack in lacks:
            if lack in self.lacks:
                pytest.skip(f"{self.name} {lack.value}")


def simulated(_folder: Path) -> EngineCase:
    """Made-up tokens, from the real accounting."""

    def make(options: EngineOptions) -> Engine:
        return SimulatedEngine(SimulatedSpeed(1000, {1: 0.01}), _limits(options), sleep=lambda _seconds: None)

    return EngineCase("simulated", make, frozenset({Lack.SAMPLING, Lack.RECALL, Lack.MULTIBYTE}))


def llama_cpp(_folder: Path) -> EngineCase:
    """The packaged model."""
    from backend_service.models import locate_model

    return llama_case(
        "llama_cpp",
        locate_model("default"),
        ending_prompt=ChatPrompt((ChatTurn("system", "Answer yes."), ChatTurn("user", "Yes?"))),
        slow=True,
    )


def llama_cpp_tiny(architecture: str, *lacks: Lack, flash_attention: bool = True) -> Callable[[Path], EngineCase]:
    """A random model; its file is made in the folder."""

    def build(folder: Path) -> EngineCase:
        path = TINY_MODELS[architecture](folder / f"{architecture}.gguf")
        return llama_case(
            f"llama_cpp-{architecture}", path, frozenset({Lack.RECALL, *lacks}), flash_attention=flash_attention
        )

    return build


def llama_case(
    name: str,
    path: Path,
    lacks: frozenset[Lack] = frozenset(),
    *,
    kv_type: str = "f16",
    flash_attention: bool = True,
    ending_prompt: Prompt | None = None,
    slow: bool = False,
) -> EngineCase:
    """llama.cpp with one thread; the model is loaded once."""
    from backend_service.engines.llama_cpp import LlamaConfig, LlamaCppEngine

    model = _loaded(path)

    def make(options: EngineOptions) -> Engine:
        config = LlamaConfig(
            _limits(options),
            kv_type=kv_type,
            flash_attention=flash_attention,
            host_bytes=HOST_BYTES if options.host_tier else 0,
        )
        return LlamaCppEngine(model, config)

    return EngineCase(name, make, lacks, ending_prompt, slow)


def mlx(_folder: Path) -> EngineCase:
    """The packaged model, in float32."""
    need_mlx()
    from backend_service.models import locate_model

    return mlx_case(
        "mlx",
        locate_model("default"),
        frozenset({Lack.EXACTNESS}),
        ending_prompt=ChatPrompt((ChatTurn("system", "Answer yes."), ChatTurn("user", "Yes?"))),
        slow=True,
    )


def mlx_tiny(architecture: str, *, run_ahead: bool = False) -> Callable[[Path], EngineCase]:
    """A random model; its file is made in the folder. Rounding decides nothing in it."""

    def build(folder: Path) -> EngineCase:
        need_mlx()
        path = TINY_MODELS[architecture](folder / f"{architecture}.gguf")
        name = f"mlx-{architecture}{'-ahead' if run_ahead else ''}"
        return mlx_case(name, path, frozenset({Lack.RECALL}), run_ahead=run_ahead)

    return build


def mlx_case(
    name: str,
    path: Path,
    lacks: frozenset[Lack] = frozenset(),
    *,
    run_ahead: bool = False,
    ending_prompt: Prompt | None = None,
    slow: bool = False,
) -> EngineCase:
    """MLX in float32, on the CPU with one thread unless `MLX_DEVICE` says gpu; the model is loaded once."""
    from backend_service.engines.mlx_lm import MlxConfig, MlxEngine

    model = _loaded_mlx(path)

    def make(options: EngineOptions) -> Engine:
        return MlxEngine(model, MlxConfig(_limits(options), run_ahead=run_ahead))

    return EngineCase(name, make, lacks | {Lack.HOST_TIER, Lack.SHARED_CELLS}, ending_prompt, slow)


@functools.cache
def _loaded_mlx(path: Path) -> MlxModel:
    from backend_service.engines.mlx_model import MlxModel
    from backend_service.settings import cache_directory

    return MlxModel(path, device=MLX_DEVICE, weights="float32", cache=cache_directory() / "mlx")


@functools.cache
def _loaded(path: Path) -> LlamaModel:
    from backend_service.engines.llama_model import LlamaModel

    return LlamaModel(path)


def _limits(options: EngineOptions) -> PoolLimits:
    return PoolLimits(
        options.capacity_tokens,
        options.max_live,
        options.max_retained,
        options.retained_tokens,
        host_tokens=HOST_TOKENS if options.host_tier else 0,
    )


CASES: dict[str, Callable[[Path], EngineCase]] = {
    "simulated": simulated,
    "llama_cpp": llama_cpp,
    "llama_cpp-qwen2": llama_cpp_tiny("qwen2"),
    "llama_cpp-qwen2-noflash": llama_cpp_tiny("qwen2", Lack.EXACTNESS, flash_attention=False),
    # Cells of tokens that fell out of its window are used again, so flash attention's sums are in no order there.
    "llama_cpp-gemma2": llama_cpp_tiny("gemma2", Lack.REUSE, Lack.HOST_TIER, flash_attention=False),
    "llama_cpp-mamba": llama_cpp_tiny("mamba", Lack.REUSE, Lack.HOST_TIER),
    "mlx": mlx,
    "mlx-qwen2": mlx_tiny("qwen2"),
    "mlx-qwen2-ahead": mlx_tiny("qwen2", run_ahead=True),
}
