"""The tokenizer inside a GGUF file, as the files that an mlx-lm folder has for it.

Only byte-level BPE ("gpt2"). Its rules for splitting text into words are not in the file, only their name; they are
given here as llama.cpp applies them, so that both engines make the same tokens of the same text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from backend_service.gguf_file import GgufFile
from service_kit.faults import StartupFailed

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
"""Of `tokenizer.ggml.token_type`; all others are text."""
_DEFAULT_ID = 11
"""Begin and end token of a byte-level BPE that names none."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Splitting:
    patterns: tuple[str, ...]
    """Each is applied to what the ones before left; what it does not match stays as it is."""
    ignore_merges: bool = False
    """A word that is a token is that token, whatever the merges say."""
    add_bos: bool = False
    """Unless the file says otherwise."""


_SPLITTINGS = {
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Splitting((_GPT2,)),
    "smollm": _Splitting((r"\p{N}", _GPT2)),
    "qwen2": _Splitting((_WORDS % r"\p{N}",)),
    "llama-bpe": _Splitting((_WORDS % r"\p{N}{1,3}",), ignore_merges=True, add_bos=True),
}
_ALIASES = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2", "phi-2": "gpt-2", "starcoder": "smollm", "refact": "smollm", "command-r": "smollm",
}  # fmt: skip


def tokenizer_files(gguf: GgufFile) -> dict[str, str]:
    """Contents by name: tokenizer.json, tokenizer_config.json, generation_config.json. Raises `StartupFailed` for a
    tokenizer of another kind."""
    metadata = gguf.metadata
    splitting = _splitting(gguf)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(set(tokens)) != len(tokens) or len(kinds) != len(tokens):
        raise StartupFailed(f"Model file {gguf.path} has a damaged vocabulary; fetch it again, or choose another one.")
    bos, eos = (_special_id(metadata, name, len(tokens)) for name in ("bos", "eos"))
    begins = metadata.get("tokenizer.ggml.add_bos_token", splitting.add_bos) and bos is not None
    config = {
        "bos_token": None if bos is None else tokens[bos],
        "eos_token": None if eos is None else tokens[eos],
        "add_bos_token": bool(begins),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "chat_template": metadata.get("tokenizer.chat_template", ""),
        "model_max_length": metadata.get(f"{metadata['general.architecture']}.context_length"),
    }
    ends = [_special_id(metadata, name, len(tokens)) for name in ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")]
    eos_ids = list(dict.fromkeys(token for token in [eos, *ends] if token is not None))
    return {
        "tokenizer.json": _tokenizer(tokens, kinds, metadata.get("tokenizer.ggml.merges", ()), splitting).to_str(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=1),
        "generation_config.json": json.dumps({"bos_token_id": bos, "eos_token_id": eos_ids}, indent=1),
    }


def _splitting(gguf: GgufFile) -> _Splitting:
    kind = gguf.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2" or not gguf.metadata.get("tokenizer.ggml.tokens"):
        raise StartupFailed(
            f"Model file {gguf.path} has a tokenizer of kind {kind!r}, and the MLX engine reads byte-level BPE (gpt2) "
            "from GGUF files only; give it the model's MLX folder, or use --engine llama_cpp."
        )
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    splitting = _SPLITTINGS.get(_ALIASES.get(name, name))
    if splitting is None:
        raise StartupFailed(
            f"Model file {gguf.path} splits text into words by the rules {name!r}, which the MLX engine does not know; "
            "give it the model's MLX folder, or use --engine llama_cpp."
        )
    return splitting


def _tokenizer(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], splitting: _Splitting) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens) if kinds[index] != _UNUSED}
    pairs = [(left, right) for left, _, right in (_parted(merge) for merge in merges)]
    known = [pair for pair in pairs if {*pair, pair[0] + pair[1]} <= vocabulary.keys()]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=known, ignore_merges=splitting.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer


def _parted(merge: str) -> tuple[str, str, str]:
    """At the first space after the first character, which may be a space itself."""
    head, tail = merge[:1], merge[1:]
    left, space, right = tail.partition(" ")
    return head + left, space, right


def _special_id(metadata: dict[str, Any], name: str, size: int) -> int | None:
    default = _DEFAULT_ID if name in ("bos", "eos") else None
    token = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    return token if token is not None and 0 <= token < size else None
