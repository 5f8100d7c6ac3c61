"""A model loaded by MLX: weights in the type that its device computes fast in, tokenizer, vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import structlog
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model

from backend_service.engines.folder_cache import manifest
from backend_service.engines.mlx_folder import check_folder, folder_fingerprint, stored_precision
from backend_service.engines.mlx_gguf import convert
from backend_service.engines.mlx_tokenizer import MlxTokenizer
from backend_service.models import check_gguf, name_of
from backend_service.prompt_tokenizer import PromptTokenizer
from service_kit.faults import StartupFailed
from service_kit.requests import Prompt

_DENSE = {"float32": (mx.float32, "f32"), "bfloat16": (mx.bfloat16, "bf16")}
_NO_LIMIT = 1 << 20
"""Context of a model that names none."""

_log = structlog.get_logger(__name__)


class MlxModel:
    """Weights and tokenizer. Made on the engine's thread, which owns all of MLX's state from then on; `tokenize` is for
    any thread."""

    def __init__(
        self,
        path: Path,
        *,
        cache: Path,
        weights: str = "auto",
        device: str = "auto",
        name: str = "",
        kv_tokens: int = 0,
    ) -> None:
        """`path`: an mlx-lm folder, or a GGUF file, which is converted into `cache`. `device`: auto, cpu or gpu.
        `weights`: how they are held in memory: stored, float32, bfloat16, or auto for what the device computes fastest
        in (float32 on a CPU, as stored on Metal, bfloat16 on CUDA). `kv_tokens`: size of the KV cache that must fit
        beside them. Raises `StartupFailed`."""
        self.device = _choose_device(device)
        self.device_name = _device_name() if self.device == "gpu" else ""
        """A GPU's own name; empty for a CPU."""
        folder = path if path.is_dir() else _converted(path, cache)
        origin = manifest(folder)
        config = check_folder(folder)
        dense = _dense(weights, self.device)
        self.module = _build(folder)
        """Call it with tokens (B, N) of int32 and a cache for logits (B, N, V). All of its arrays are in memory."""
        _set_types(self.module, dense, on_cpu=self.device == "cpu", converted=bool(origin))
        self.vocabulary_size, self.kv_bytes_per_token = _sizes(self.module)
        self.name = name or name_of(path)
        tokenizer = MlxTokenizer(folder, vocabulary_size=self.vocabulary_size)
        self.vocabulary = tokenizer.vocabulary
        self._prompts = PromptTokenizer(
            tokenizer,
            self.vocabulary,
            model_name=self.name,
            template=tokenizer.template,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
        )
        self.tokenizer_fingerprint = self._prompts.fingerprint
        """Equal for equal tokenisation, in other file formats and engines too."""
        self.fingerprint = origin.get("fingerprint") or folder_fingerprint(folder)
        """Of the weights' origin: what llama.cpp's is of the same GGUF file."""
        stored, held = origin.get("precision") or stored_precision(folder, config), dense and _DENSE[dense][1]
        self.precision = stored if held in (None, stored) else f"{stored} as {held}"
        """As stored, and as held where that differs, such as "q4_1 as f32"."""
        limits = (
            config.get("max_position_embeddings"),
            (config.get("text_config") or {}).get("max_position_embeddings"),
        )
        self.train_context_tokens = int(next(filter(None, limits), _NO_LIMIT))
        self._read_weights(kv_tokens)

    def tokenize(self, prompt: Prompt, *, context_tokens: int) -> Sequence[int]:
        """See `PromptTokenizer.tokenize`. Any thread."""
        return self._prompts.tokenize(prompt, context_tokens=context_tokens)

    def _read_weights(self, kv_tokens: int) -> None:
        arrays = _arrays(self.module)
        if self.device == "cpu" or mx.metal.is_available():  # other GPUs have memory of their own
            problem = memory_shortage(
                weight_bytes=sum(array.nbytes for array in arrays),
                kv_bytes=kv_tokens * self.kv_bytes_per_token,
                available_bytes=psutil.virtual_memory().available,
            )
            if problem:
                raise StartupFailed(problem)
        try:
            mx.eval(arrays)
        except RuntimeError as error:
            raise StartupFailed(
                f"The weights of {self.name} cannot be read into memory ({error}); choose a smaller model, or fetch it "
                "again."
            ) from error


def memory_shortage(*, weight_bytes: int, kv_bytes: int, available_bytes: int) -> str:
    """What to tell whoever starts a model that does not fit; "" when it does."""
    needed = weight_bytes + kv_bytes
    if needed <= available_bytes:
        return ""
    return (
        f"The model needs {needed >> 20} MiB of memory ({weight_bytes >> 20} for weights, {kv_bytes >> 20} for the KV "
        f"cache) and {available_bytes >> 20} MiB are available; hold the weights as they are stored (--weights "
        "stored), lower --kv-tokens, or choose a smaller model."
    )


def _choose_device(wanted: str) -> str:
    available = mx.is_available(mx.gpu)
    if wanted == "gpu" and not available:
        raise StartupFailed("MLX finds no GPU here; leave --device out, or set it to cpu.")
    if available and wanted != "cpu":
        mx.set_default_device(mx.gpu)
        return "gpu"
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # on a CPU it calls a C++ compiler, in the middle of a request
    return "cpu"


def _device_name() -> str:
    return str(mx.device_info(mx.gpu).get("device_name", "GPU"))


def _dense(weights: str, device: str) -> str | None:
    """What all weights are turned into; None: nothing."""
    if weights == "auto":
        weights = "float32" if device == "cpu" else "stored" if mx.metal.is_available() else "bfloat16"
    return None if weights == "stored" else weights


def _converted(path: Path, cache: Path) -> Path:
    check_gguf(path)
    return convert(path, cache, progress=lambda step: _log.info("converting model", step=step))


def _build(folder: Path) -> Module:
    """The model, its weights not yet read."""
    try:
        module: Module = load_model(folder, lazy=True)[0]
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise StartupFailed(
            f"Model folder {folder} cannot be loaded by mlx-lm ({reason}); fetch it again, or choose a model that "
            "mlx-lm supports."
        ) from error
    return module


def _set_types(module: Module, dense: str | None, *, on_cpu: bool, converted: bool) -> None:
    """Lazy: no weight is read."""
    scales = [part["scales"] for part in _parts(module) if "scales" in part]
    if dense:
        module.set_dtype(mx.float32)  # of scales too: weights are to be what they stand for, not rounded on the way
        dequantize_model(module)
        module.set_dtype(_DENSE[dense][0])
    elif on_cpu and scales:
        module.set_dtype(mx.float32)  # a CPU takes twenty times as long for quantised weights with 16 bit scales
    elif converted:
        # A GGUF file has its norms in 32 bits whatever the rest is in, and mixed types compute in the larger.
        module.set_dtype(scales[0].dtype if scales else module.model.embed_tokens.weight.dtype)


def _sizes(module: Module) -> tuple[int, int]:
    """Rows of the output, and bytes that a token takes in the KV cache: what computing one would leave there. Lazy."""
    cache = make_prompt_cache(module)
    logits = module(mx.zeros((1, 1), mx.int32), cache=cache)
    held = [array for entry in cache for array in (getattr(entry, "keys", None), getattr(entry, "values", None))]
    bytes_per_token = sum(array.nbytes // array.shape[2] for array in held if array is not None)
    return logits.shape[-1], bytes_per_token


def _arrays(module: Module) -> list[mx.array]:
    """Parameters, and the private arrays that `parameters()` leaves out, such as frequencies of positions."""
    return [value for part in _parts(module) for value in part.values() if isinstance(value, mx.array)]


def _parts(module: Any) -> list[dict[str, Any]]:
    """The module and all below it, each a dictionary of what it holds."""
    return list(module.modules())
