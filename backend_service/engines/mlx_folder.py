"""A model as mlx-lm and the hubs keep it: a folder of config.json, *.safetensors and tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from backend_service.models import fingerprint
from service_kit.faults import StartupFailed

_WEIGHTS = "model*.safetensors"
"""As mlx-lm looks for them."""
_TYPES = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16"}
_LONGEST_HEADER = 100 << 20
_UNREADABLE = (OSError, ValueError, struct.error, RecursionError)
_SENSELESS = (KeyError, TypeError, IndexError, AttributeError)
"""Both are what a damaged file comes to: of its bytes and its text, and of what the text says."""


def check_folder(folder: Path) -> dict[str, Any]:
    """The contents of config.json. Raises `StartupFailed` unless all files are there and as long as they say."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StartupFailed(
            f"Folder {folder} is not an MLX model: its config.json cannot be read "
            f"({getattr(error, 'strerror', None) or error}); give --model the folder of one, or a GGUF file."
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise StartupFailed(f"{folder / 'config.json'} names no model_type; choose a model that mlx-lm supports.")
    if not isinstance(_quantization(config), dict):
        raise StartupFailed(
            f"{folder / 'config.json'} does not say how the weights are quantised; fetch it again, or choose another "
            "model."
        )
    files = _weight_files(folder)
    if not files:
        raise StartupFailed(f"Folder {folder} has no weights ({_WEIGHTS}); fetch it again, or choose another one.")
    for path in files:
        _header(path)
    return config


def folder_fingerprint(folder: Path) -> str:
    """Tells models apart: a hash of the configuration and the tokenizer, and of samples of the weights. 16 hex
    digits."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", folder / "tokenizer.json", *_weight_files(folder)]:
        digest.update(f"{path.name} {fingerprint(path)}\n".encode())
    return digest.hexdigest()[:16]


def stored_precision(folder: Path, config: dict[str, Any]) -> str:
    """How most weights are stored, such as "bf16", or "4-bit g64": quantised to 4 bits in groups of 64."""
    quantization = _quantization(config)
    if "bits" in quantization and quantization.get("mode", "affine") == "affine":
        return f"{quantization['bits']}-bit g{quantization.get('group_size', 64)}"
    if kind := quantization.get("mode") or quantization.get("quant_method"):
        return str(kind)
    sizes: Counter[str] = Counter()
    for path in _weight_files(folder):
        for tensor in _header(path).values():
            first, last = tensor["data_offsets"]
            sizes[tensor["dtype"]] += last - first
    kind = sizes.most_common(1)[0][0] if sizes else "unknown"
    return _TYPES.get(kind, kind.lower())


def _quantization(config: dict[str, Any]) -> Any:
    """A dictionary, empty for weights that are not; whatever else a damaged file has."""
    return config.get("quantization") or config.get("quantization_config") or {}


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(_WEIGHTS))


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file by name (https://github.com/huggingface/safetensors#format). Raises
    `StartupFailed` unless all of their bytes are there."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError("its header is longer than the file")
            tensors: dict[str, dict[str, Any]] = json.loads(file.read(length))
        tensors.pop("__metadata__", None)
        end = 8 + length + max((_extent(tensor) for tensor in tensors.values()), default=0)
        if end > size:
            raise ValueError(f"it has {size} bytes and needs {end}")
    except (*_UNREADABLE, *_SENSELESS) as error:
        raise StartupFailed(f"Weights {path} are damaged or cut short ({error}); fetch them again.") from error
    return tensors


def _extent(tensor: dict[str, Any]) -> int:
    """Where it ends, in bytes after the header."""
    first, last = tensor["data_offsets"]
    if not (isinstance(tensor["dtype"], str) and type(first) is type(last) is int and 0 <= first <= last):
        raise ValueError("its header makes no sense")
    return int(last)
