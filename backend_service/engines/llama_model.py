"""A GGUF model loaded by llama.cpp: its vocabulary, tokenizer and chat template. Safe to use from any thread."""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import llama_cpp

from backend_service.engines.base import Vocabulary
from backend_service.gguf_file import precision_named, read_gguf
from backend_service.models import fingerprint
from backend_service.prompt_tokenizer import PromptTokenizer
from service_kit.faults import StartupFailed
from service_kit.requests import Prompt

_log = logging.getLogger("llama.cpp")
_LEVELS = {2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_complaints: deque[str] = deque(maxlen=8)


def _on_log(level: int, text: bytes, _user_data: object) -> None:
    line = text.decode("utf-8", "replace").strip()
    if level >= 4 and line:
        _complaints.append(line)
    _log.log(_LEVELS.get(level, logging.DEBUG), line)


_log_callback = llama_cpp.llama_log_callback(_on_log)
"""Lives as long as the module: the library keeps calling it."""


@functools.cache
def start_library() -> None:
    """Initialise llama.cpp once a process and take over its log."""
    llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(None))
    llama_cpp.llama_backend_init()


def complaint() -> str:
    """What llama.cpp said at error level since this was last asked, for our own messages: the first line, since the
    later ones only say that it failed."""
    said = _complaints[0] if _complaints else "llama.cpp gave no reason"
    _complaints.clear()
    return said


class LlamaModel:
    """Weights and tokenizer. Freed with the last reference."""

    def __init__(self, path: Path, *, n_gpu_layers: int = 0, name: str = "") -> None:
        """Raises `StartupFailed` when llama.cpp cannot load the file or the model is not a decoder."""
        start_library()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise StartupFailed(
                f"Model file {path} cannot be loaded ({complaint()}); it may be truncated or of a newer format: "
                "fetch it again, or choose another one."
            )
        weakref.finalize(self, llama_cpp.llama_model_free, model)
        self.pointer = model
        if not _generates(model):
            architecture = _metadata(model, b"general.architecture")
            raise StartupFailed(
                f"Model file {path} ({architecture}) is not a decoder-only language model, so it cannot "
                "generate text token by token; choose another one."
            )
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.vocabulary = self._read_vocabulary()
        self.name = name or path.stem
        self.fingerprint = fingerprint(path)
        self.train_context_tokens = llama_cpp.llama_model_n_ctx_train(model)
        self.shares_prefixes = not (
            llama_cpp.llama_model_is_recurrent(model)
            or llama_cpp.llama_model_is_hybrid(model)
            or llama_cpp.llama_model_n_swa(model)
        )
        """A sequence can be cut at any prefix, and that shared: not so where the state is one of all tokens, nor where
        llama.cpp reuses the cells of tokens that fell out of a sliding window."""
        self.precision = precision_named(_metadata(model, b"general.file_type")) or read_gguf(path).precision
        """How the file stores most weights, such as "q4_1"."""
        self._prompts = PromptTokenizer(
            _Encoder(self._vocab),
            self.vocabulary,
            model_name=self.name,
            template=(llama_cpp.llama_model_chat_template(model, None) or b"").decode("utf-8", "replace"),
            bos=self._special(llama_cpp.llama_vocab_bos(self._vocab)),
            eos=self._special(llama_cpp.llama_vocab_eos(self._vocab)),
        )
        self.tokenizer_fingerprint = self._prompts.fingerprint
        """Equal for equal tokenisation, in other file formats and engines too."""

    def tokenize(self, prompt: Prompt, *, context_tokens: int) -> Sequence[int]:
        """Token ids, at least one. Raises `InvalidRequest` for ids out of the vocabulary, and for text so long that it
        could not fit `context_tokens` (that much text is not even tokenized)."""
        return self._prompts.tokenize(prompt, context_tokens=context_tokens)

    def _read_vocabulary(self) -> Vocabulary:
        size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        return Vocabulary(
            pieces=[self._piece(token, special=False) for token in range(size)],
            eos=frozenset(token for token in range(size) if llama_cpp.llama_vocab_is_eog(self._vocab, token)),
        )

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[:size]

    def _special(self, token: int) -> str:
        return self._piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""


class _Encoder:
    """Implements `TextEncoder`. The caller keeps the model alive."""

    def __init__(self, vocab: llama_cpp.llama_vocab_p) -> None:
        self._vocab = vocab

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> list[int]:
        data = text.encode()
        room = len(data) + 8  # enough unless the tokenizer rewrites text; then it says how many it needs, as -count
        while True:
            buffer = (llama_cpp.llama_token * room)()
            count = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, room, add_special, parse_special)
            if count >= 0:
                return list(buffer[:count])
            room = -count


def _generates(model: llama_cpp.llama_model_p) -> bool:
    """Whether tokens can be computed one after the other. To llama.cpp an encoder such as BERT is a decoder too, and
    what it decodes is nonsense. A context tells them apart: an encoder's has no KV cache, or its attention looks ahead.
    """
    if llama_cpp.llama_model_has_encoder(model) or not llama_cpp.llama_model_has_decoder(model):
        return False
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 1
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        return True  # the engine's own context will fail as well, and say why
    try:
        return bool(llama_cpp.llama_get_memory(context)) and bool(llama_cpp.llama_get_causal_attn(context))
    finally:
        llama_cpp.llama_free(context)


def _metadata(model: llama_cpp.llama_model_p, key: bytes) -> str:
    """Text of a metadata value, such as "llama"; "" when it is missing."""
    buffer = ctypes.create_string_buffer(64)
    llama_cpp.llama_model_meta_val_str(model, key, buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")
