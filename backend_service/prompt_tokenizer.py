"""From prompts to token ids, the same way for every engine, and a fingerprint of the way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Protocol

from backend_service.chat import render_chat
from backend_service.engines.base import Vocabulary
from service_kit.faults import InvalidRequest
from service_kit.requests import ChatPrompt, ChatTurn, Prompt, TextPrompt, TokenPrompt

_FINGERPRINT_VERSION = b"1"
"""Changes whenever what goes into a fingerprint does."""
_PROBES = (
    "", " ", "  ", "a", " a", "  a", "a ", "a  ", "\n", "\n\n\n", "\t\tx", " \n \n a", "\r\nA\r\n", "\u00a0\u3000x",
    "The quick brown fox's tail isn't what we'd've said, I'll say. I'm, they're, THEY'RE, IT'S DON'T",
    "0 1 12 123 1234 12345 3.14159 1,000,000 ½ ² Ⅷ ١٢٣", "naïve façade Zürich ŁÓDŹ ñandú", "ǅ ﬁ ß İ ſ",
    "Привет, мир! Γειά σου Κόσμε", "שלום עולם مرحبا بالعالم", "नमस्ते दुनिया สวัสดี", "你好，世界。日本語のテキスト 한국어",
    "👋🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️ 𝕏", "zero\u200bwidth\u200djoin\ufeffbom\u0000nul\u007f\u0085\u2028",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2 != 0}  # ok\n\n\tif x<=1:pass",
    "https://example.org/a_b-c?d=%20&e=f#g <b>&amp;</b> $100 +5% ~x^2|y `code` \\n @user #tag", "...!?—–…“”‘’«»",
    "a<|endoftext|>", "a<|im_start|>user\nHi<|im_end|>\n", "a<s>[INST] Hi [/INST]</s>", "a<|eot_id|><|begin_of_text|>",
    "a<|end|>x<|user|>", "a<pad><unk><mask>[PAD]", "<tool_call> {} </tool_call>", "<0x0A> ▁a ĠaĊ", "_" * 40, "=" * 65,
    " " * 33 + "x", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "antidisestablishmentarianism",
)  # fmt: skip
"""Texts on which tokenizers of similar vocabularies differ. None begins with a special token: some libraries warn when
they add a begin token to one."""
_PROBE_CHAT = (
    ChatTurn("system", "Answer briefly."),
    ChatTurn("user", " Hi! 1+1? <|im_end|>\n"),
    ChatTurn("assistant", "2"),
    ChatTurn("user", "And 2+2?"),
)
_PROBE_TIME = datetime(2024, 7, 26, 12, 0)


class TextEncoder(Protocol):
    """A tokenizer of plain text."""

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> Sequence[int]:
        """Token ids. `parse_special`: special tokens written out in the text count as such; `add_special`: with what
        the model wants before and after a prompt, such as a begin token. Any thread."""


class PromptTokenizer:
    """What all engines do around their tokenizers. Safe to use from any thread."""

    def __init__(
        self, encoder: TextEncoder, vocabulary: Vocabulary, *, model_name: str, template: str, bos: str, eos: str
    ) -> None:
        """`template`: the model's chat template, "" for none; `bos`, `eos`: texts of its begin and end tokens."""
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._model_name = model_name
        self._template = template
        self._bos, self._eos = bos, eos
        self._longest_piece = max((len(piece) for piece in vocabulary.pieces), default=0)
        self.fingerprint = self._fingerprint()
        """16 hex digits, equal for equal tokenisation whatever the engine or the file format: a hash of the vocabulary
        and of what becomes of a list of tricky texts and of a chat."""

    def tokenize(self, prompt: Prompt, *, context_tokens: int) -> Sequence[int]:
        """Token ids, at least one. Raises `InvalidRequest` for ids out of the vocabulary, and for text so long that it
        could not fit `context_tokens` (that much text is not even tokenized)."""
        tokens: Sequence[int]
        match prompt:
            case TokenPrompt(ids):
                for index, token in enumerate(ids):
                    if token >= self._vocabulary.size:
                        raise InvalidRequest(
                            f"prompt.token_ids[{index}]",
                            f"is {token}, but the vocabulary of {self._model_name} ends at "
                            f"{self._vocabulary.size - 1}; tokenize with this model",
                        )
                return ids
            case TextPrompt(text):
                tokens = self._encode(text, context_tokens, parse_special=False, add_special=True)
            case ChatPrompt(turns):
                if not self._template:
                    raise InvalidRequest(
                        "prompt.chat", f"needs a chat template and {self._model_name} has none; send text"
                    )
                text, begun = self._render(turns)
                tokens = self._encode(text, context_tokens, parse_special=True, add_special=not begun)
        if not tokens:
            raise InvalidRequest("prompt", "has no tokens; send some text")
        return tokens

    def _encode(self, text: str, context_tokens: int, *, parse_special: bool, add_special: bool) -> Sequence[int]:
        size = len(text.encode())
        if size > context_tokens * self._longest_piece:
            raise InvalidRequest(
                "prompt", f"has {size} bytes, far more than the context of {context_tokens} tokens; shorten it"
            )
        return self._encoder.encode(text, parse_special=parse_special, add_special=add_special)

    def _render(self, turns: Sequence[ChatTurn], now: datetime | None = None) -> tuple[str, bool]:
        """The text, and whether it has its begin token already."""
        text = render_chat(self._template, turns, bos=self._bos, eos=self._eos, now=now)
        return text, bool(self._bos) and text.startswith(self._bos)

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(_FINGERPRINT_VERSION)
        lengths = [len(piece) for piece in self._vocabulary.pieces]
        digest.update(json.dumps([lengths, sorted(self._vocabulary.eos)]).encode())
        digest.update(b"".join(self._vocabulary.pieces))
        for tokens in self._behaviour():
            digest.update(json.dumps(tokens).encode())
        return digest.hexdigest()[:16]

    def _behaviour(self) -> Iterator[list[int] | str]:
        for text in _PROBES:
            for parse_special in (False, True):
                for add_special in (False, True):
                    yield list(self._encoder.encode(text, parse_special=parse_special, add_special=add_special))
        if not self._template:
            yield "none"
            return
        try:
            text, begun = self._render(_PROBE_CHAT, _PROBE_TIME)
        except InvalidRequest as refusal:
            yield str(refusal)
        else:
            yield list(self._encoder.encode(text, parse_special=True, add_special=not begun))
