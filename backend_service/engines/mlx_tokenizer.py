"""The tokenizer of an mlx-lm folder, made to behave as llama.cpp's does on the same model.

Read with the `tokenizers` library alone. Safe to use from any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from backend_service.engines.base import Vocabulary
from service_kit.faults import StartupFailed

_END_TOKENS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""What llama.cpp takes for an end of generation wherever a vocabulary has it (llama-vocab.cpp, special_eog_ids)."""
_FILL_TOKENS = (
    ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)
"""The same for the padding, repository and file marks of code models: of each row the first that is there."""
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused\d+>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
"""Added tokens that converters to GGUF take for control tokens, whatever tokenizer.json says."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_MARK = "\u2581"


class MlxTokenizer:
    """Implements `TextEncoder`."""

    def __init__(self, folder: Path, *, vocabulary_size: int) -> None:
        """`vocabulary_size`: rows of the model's embedding. Raises `StartupFailed` when files are missing, damaged, or
        of another model."""
        self._folder = folder
        description = self._read("tokenizer.json", needed=True)
        config = self._read("tokenizer_config.json")
        generation = {**self._read("config.json"), **self._read("generation_config.json")}
        self._control = _harden(description)
        self._plain, self._special = self._load(description), self._load(description)
        self._plain.encode_special_tokens = True  # special tokens written out are ordinary text
        tokens = self._special.get_vocab(with_added_tokens=True)
        last = max(tokens.values(), default=-1)
        if last >= vocabulary_size:
            raise StartupFailed(
                f"The tokenizer in {folder} has token ids up to {last}, but its model ends at {vocabulary_size - 1}; "
                "they do not belong together: fetch the folder again."
            )
        self.bos, self.eos = (_special_text(config.get(f"{name}_token")) for name in ("bos", "eos"))
        self.template = _template(folder, config)
        self._prefix, self._suffix = self._surroundings(config, tokens)
        self.vocabulary = Vocabulary(
            pieces=self._pieces(description, tokens, vocabulary_size),
            eos=_end_tokens(generation.get("eos_token_id"), tokens.get(self.eos), tokens, vocabulary_size),
        )

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> list[int]:
        """See `TextEncoder.encode`."""
        ids: list[int] = (self._special if parse_special else self._plain).encode(text, add_special_tokens=False).ids
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def _read(self, name: str, *, needed: bool = False) -> dict[str, Any]:
        path = self._folder / name
        if not needed and not path.exists():
            return {}
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise StartupFailed(
                f"{path} cannot be read ({_reason(error)}); the MLX engine needs the folder of a model with its "
                "tokenizer.json: fetch it again."
            ) from error
        if not isinstance(content, dict):
            raise StartupFailed(f"{path} is no JSON object; fetch the model's folder again.")
        return content

    def _load(self, description: Mapping[str, Any]) -> Tokenizer:
        try:
            return Tokenizer.from_str(json.dumps(description))
        except Exception as error:
            raise StartupFailed(
                f"{self._folder / 'tokenizer.json'} is no tokenizer ({error}); fetch the model's folder again."
            ) from error

    def _surroundings(self, config: Mapping[str, Any], tokens: Mapping[str, int]) -> tuple[list[int], list[int]]:
        """What goes before and after a text: as the configuration says, else as the tokenizer's own rules do."""
        inner = self._special.encode("a", add_special_tokens=False).ids
        whole: list[int] = self._special.encode("a", add_special_tokens=True).ids
        at = next((at for at in range(len(whole)) if whole[at : at + len(inner)] == inner), 0)
        prefix, suffix = whole[:at], whole[at + len(inner) :]
        if (begins := config.get("add_bos_token")) is not None:
            prefix = [tokens[self.bos]] if begins and self.bos in tokens else []
        if (ends := config.get("add_eos_token")) is not None:
            suffix = [tokens[self.eos]] if ends and self.eos in tokens else []
        return prefix, suffix

    def _pieces(self, description: Mapping[str, Any], tokens: Mapping[str, int], size: int) -> list[bytes]:
        pieces = [b""] * size  # an id without a token is padding of the embedding
        added = {token["content"] for token in description.get("added_tokens", ())}
        decode = _byte_level if '"ByteLevel"' in json.dumps(description.get("decoder")) else _sentence_piece
        for token, index in tokens.items():
            if index not in self._control:
                pieces[index] = token.encode() if token in added else decode(token)
        return pieces


def _harden(description: dict[str, Any]) -> frozenset[int]:
    """Give a tokenizer.json the rules of llama.cpp, and say which tokens are control tokens: those without text."""
    if (description.get("normalizer") or {}).get("type") == "NFC":
        description["normalizer"] = None  # llama.cpp takes text as it comes
    description["truncation"] = description["padding"] = None
    control = set()
    for token in description.get("added_tokens", ()):
        if _LOOKS_SPECIAL.fullmatch(token["content"]) or token["content"] in _END_TOKENS:
            token["special"] = True
        if token["special"]:
            control.add(token["id"])
    return frozenset(control)


def _end_tokens(named: Any, eos: int | None, tokens: Mapping[str, int], size: int) -> frozenset[int]:
    ends = {*(named if isinstance(named, list) else [named]), eos}
    ends |= {tokens[token] for token in _END_TOKENS if token in tokens}
    for row in _FILL_TOKENS:
        ends.add(next((tokens[token] for token in row if token in tokens), None))
    for calls in (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"), ("<|call|>", "<|flush|>")):
        if all(token in tokens for token in calls):
            ends.discard(tokens.get("<|end|>"))  # there it ends a part of an answer
    return frozenset(token for token in ends if isinstance(token, int) and 0 <= token < size)


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    try:
        return (folder / "chat_template.jinja").read_text("utf-8")
    except FileNotFoundError:
        template = config.get("chat_template") or ""
    if isinstance(template, list):  # several with names
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", "")
    return str(template)


def _special_text(token: Any) -> str:
    """Configurations give the text, an object with it, or null."""
    return str(token["content"] if isinstance(token, dict) else token or "")


def _byte_table() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: printable Latin-1 is itself, the rest is counted up from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


_BYTES = _byte_table()


def _byte_level(token: str) -> bytes:
    if not all(character in _BYTES for character in token):
        return token.encode()
    return bytes(_BYTES[character] for character in token)


def _sentence_piece(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_WORD_MARK, " ").encode()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
