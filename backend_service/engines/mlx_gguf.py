"""GGUF files as mlx-lm folders: converted once and without loss, kept in a cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from backend_service.engines.folder_cache import FolderCache
from backend_service.engines.mlx_gguf_tokenizer import tokenizer_files
from backend_service.gguf_file import GgufFile, read_gguf
from backend_service.models import fingerprint
from service_kit.faults import StartupFailed

_FORMAT = 1
"""Of a converted folder; a change of what is written makes old ones unfit."""
_BITS = {"q4_0": 4, "q4_1": 4, "q8_0": 8}
"""mlx repacks these exactly, as its affine quantisation."""
_LOSSLESS = ("f32", "f16", "bf16", *_BITS)
"""Tensor types that can be had without loss; others mlx would round to float16 without a word."""
_GROUP = 32
"""Values of a block that share a scale."""
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BIASED = ("attn_q", "attn_k", "attn_v")
_ROPE_FACTORS = "rope_freqs.weight"
_UNSUPPORTED = ("expert_count", "logit_scale", "residual_scale", "embedding_scale", "attention.scale")


def convert(path: Path, cache: Path, *, progress: Callable[[str], None]) -> Path:
    """The mlx-lm folder with the contents of this GGUF file, made now unless it is in `cache`.

    `progress` is told what is being done, in a few words. Raises `StartupFailed` for models, quantisations and
    tokenizers that cannot be converted without loss, and when the folder cannot be written."""
    source = fingerprint(path)
    folders = FolderCache(cache)
    name = f"{source}-{_FORMAT}"
    if found := folders.get(name):
        return found
    gguf = read_gguf(path)
    conversion = _Conversion(gguf)

    def fill(folder: Path) -> Mapping[str, Any]:
        progress(f"converting the tokenizer of {path.name}")
        files = tokenizer_files(gguf)
        progress(f"repacking {len(gguf.tensors)} tensors of {path.name}")
        weights = _load(gguf)
        files["config.json"] = json.dumps(conversion.config(weights.pop(_ROPE_FACTORS, None)), indent=1)
        for file, content in files.items():
            (folder / file).write_text(content, "utf-8")
        named = {conversion.rename(tensor): values for tensor, values in weights.items()}
        progress(f"writing {sum(values.nbytes for values in named.values()) >> 20} MiB to {cache}")
        try:
            mx.save_safetensors(str(folder / "model.safetensors"), named, metadata={"format": "mlx"})
        except RuntimeError as error:  # mlx's way to say that the disk is full
            raise OSError(str(error)) from error
        return {"source": path.name, "fingerprint": source, "precision": gguf.precision}

    return folders.make(name, fill, waiting=lambda: progress("waiting for another process that converts a model"))


def _load(gguf: GgufFile) -> dict[str, mx.array]:
    arrays = mx.load(str(gguf.path), format="gguf")
    assert isinstance(arrays, dict)
    for tensor in gguf.tensors:
        if tensor.type == "bf16":  # mlx makes float16 of it
            words = np.memmap(gguf.path, np.uint16, "r", tensor.offset, tensor.shape)
            arrays[tensor.name] = mx.array(words).view(mx.bfloat16)
    return arrays


class _Conversion:
    """Of one file. Raises `StartupFailed` from the start for what has no counterpart."""

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf
        self._architecture = gguf.metadata.get("general.architecture")
        if self._architecture not in ("llama", "qwen2"):
            raise self._refusal(f"is a model of architecture {self._architecture}")
        if (parts := gguf.metadata.get("split.count", 1)) > 1:
            raise self._refusal(f"is one of {parts} parts")
        for key in _UNSUPPORTED:
            if value := self._get(key, 0):
                raise self._refusal(f"sets {self._architecture}.{key} to {value}")
        for tensor in gguf.tensors:
            if tensor.type not in _LOSSLESS:
                raise StartupFailed(
                    f"Model file {gguf.path} has weights of type {tensor.type} ({tensor.name}), which MLX cannot take "
                    f"over without loss; choose a file in {', '.join(kind.upper() for kind in _LOSSLESS)}, give it the "
                    "model's MLX folder, or use --engine llama_cpp."
                )
            if tensor.name != _ROPE_FACTORS:
                self.rename(tensor.name)

    def rename(self, tensor: str) -> str:
        """mlx-lm's name of a tensor; those of a quantised one end in .weight, .scales and .biases."""
        stem, _, part = tensor.rpartition(".")
        if stem in _NAMES and part != "bias":
            return f"{_NAMES[stem]}.{part}"
        block, _, rest = stem.partition(".")
        layer, _, kind = rest.partition(".")
        biased = part != "bias" or (self._architecture == "qwen2" and kind in _BIASED)
        if block == "blk" and kind in _LAYER_NAMES and biased:
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{part}"
        raise self._refusal(f"has a tensor {tensor}")

    def config(self, rope_factors: mx.array | None) -> dict[str, Any]:
        """Contents of config.json. `rope_factors`: by which the frequencies of the position encoding are divided."""
        heads, size = self._number("attention.head_count"), self._number("embedding_length")
        head = self._number("attention.key_length", size // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (other := self._number(key, head)) != head:
                raise self._refusal(f"has attention heads of {head} values and {key} = {other}")
        if self._architecture == "qwen2" and head * heads != size:
            raise self._refusal(f"has {heads} attention heads of {head} values for an embedding of {size}")
        shapes = {tensor.name: tensor.shape for tensor in self._gguf.tensors}
        config: dict[str, Any] = {
            "model_type": self._architecture,
            "hidden_size": size,
            "num_hidden_layers": self._number("block_count"),
            "intermediate_size": self._number("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head,
            "rms_norm_eps": float(self._get("attention.layer_norm_rms_epsilon")),
            "vocab_size": shapes["token_embd.weight"][0],
            "max_position_embeddings": self._number("context_length"),
            "rope_theta": float(self._get("rope.freq_base", 10000.0)),
            # llama's query and key rows are stored in the order of interleaved pairs, qwen2's in halves.
            "rope_traditional": self._architecture == "llama",
            "rope_scaling": self._rope_scaling(head, rope_factors),
            "tie_word_embeddings": "output.weight" not in shapes,
        }
        bits = [_BITS[tensor.type] for tensor in self._gguf.tensors if tensor.type in _BITS]
        if bits:  # mlx-lm takes those of each tensor from its shape
            config["quantization"] = {"group_size": _GROUP, "bits": min(bits)}
        return config

    def _rope_scaling(self, head: int, factors: mx.array | None) -> dict[str, Any] | None:
        kind = self._get("rope.scaling.type", "none")
        factor = float(self._get("rope.scaling.factor", self._get("rope.scale_linear", 1.0)) or 1.0)
        if factors is not None:
            return self._llama3_scaling(head, np.array(factors.astype(mx.float32)))
        if kind == "none" or factor == 1.0:
            return None
        if kind != "linear":
            raise self._refusal(f"scales positions by the method {kind}")
        return {"rope_type": "linear", "factor": factor}

    def _llama3_scaling(self, head: int, factors: np.ndarray[Any, Any]) -> dict[str, Any]:
        """Llama 3's rule from the factors that come of it, which are all that the file has: long waves are stretched
        by one factor, short ones not at all, those between in part."""
        low, high, trained, most = 1.0, 4.0, 8192, float(factors.max())
        waves = 2 * np.pi * float(self._get("rope.freq_base", 10000.0)) ** (np.arange(0, head, 2) / head)
        smooth = np.clip((trained / waves - low) / (high - low), 0.0, 1.0)
        if factors.shape != waves.shape or not np.allclose(1 / factors, (1 - smooth) / most + smooth, rtol=1e-3):
            raise self._refusal("scales positions by factors (rope_freqs) that are not Llama 3's")
        return {
            "rope_type": "llama3",
            "factor": most,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": trained,
        }

    def _get(self, key: str, default: Any = None) -> Any:
        value = self._gguf.metadata.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise self._refusal(f"lacks the metadata {self._architecture}.{key}")
        return value

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int):
            raise self._refusal(f"has {key} = {value}, which differs between layers")
        return value

    def _refusal(self, problem: str) -> StartupFailed:
        return StartupFailed(
            f"Model file {self._gguf.path} {problem}, which the MLX engine cannot convert; give it the model's MLX "
            "folder, or use --engine llama_cpp."
        )
