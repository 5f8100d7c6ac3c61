"""From prompts to token ids, and fingerprints of how."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import pytest

from backend_service import chat
from backend_service.engines.base import Vocabulary
from backend_service.prompt_tokenizer import PromptTokenizer
from service_kit.faults import InvalidRequest
from service_kit.requests import ChatPrompt, ChatTurn, Prompt, TextPrompt, TokenPrompt

BOS, EOS = 256, 257
PIECES = [*(bytes([value]) for value in range(256)), b"", b""]
CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


class ByteEncoder:
    """A token a byte; `<s>` is a begin token."""

    def __init__(self, *, add_bos: bool = True, splits_special: bool = True, other: str = "") -> None:
        self._add_bos, self._splits_special, self._other = add_bos, splits_special, other
        self.texts: list[str] = []

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> list[int]:
        self.texts.append(text)
        ids: list[int] = []
        for index, part in enumerate(text.split("<s>") if parse_special and self._splits_special else [text]):
            ids += [BOS] * (index > 0) + list(part.encode())
        if self._other and self._other in text:
            ids.append(0)
        return [BOS] * (add_special and self._add_bos) + ids


def tokenizer(
    encoder: ByteEncoder | None = None,
    *,
    template: str = CHATML,
    pieces: Sequence[bytes] = PIECES,
    eos: frozenset[int] = frozenset({EOS}),
) -> PromptTokenizer:
    vocabulary = Vocabulary(pieces, eos)
    return PromptTokenizer(
        encoder or ByteEncoder(), vocabulary, model_name="tiny", template=template, bos="<s>", eos="</s>"
    )


def tokens(prompt: Prompt, **how: object) -> list[int]:
    return list(tokenizer(**how).tokenize(prompt, context_tokens=64))  # type: ignore[arg-type]


def test_special_tokens_in_plain_text_are_ordinary_text():
    assert tokens(TextPrompt("<s>")) == [BOS, *b"<s>"]


def test_a_chat_is_rendered_and_its_special_tokens_count():
    prompt = ChatPrompt((ChatTurn("user", "a"), ChatTurn("assistant", "b")))
    assert tokens(prompt) == [BOS, *b"[user]a[assistant]b"]
    assert tokens(ChatPrompt((ChatTurn("user", "<s>"),))) == [BOS, *b"[user]", BOS]


def test_a_begin_token_that_the_template_writes_is_not_added_again():
    assert tokens(ChatPrompt((ChatTurn("user", "a"),)), template="{{ bos_token }}" + CHATML) == [BOS, *b"[user]a"]


def test_a_chat_needs_a_template():
    with pytest.raises(InvalidRequest, match=r"prompt\.chat: needs a chat template and tiny has none"):
        tokens(ChatPrompt((ChatTurn("user", "a"),)), template="")


def test_token_ids_must_be_in_the_vocabulary():
    assert tokens(TokenPrompt((0, EOS))) == [0, EOS]
    with pytest.raises(InvalidRequest, match=r"prompt\.token_ids\[1\]: is 258, but the vocabulary of tiny ends at 257"):
        tokens(TokenPrompt((0, EOS + 1)))


def test_text_without_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="no tokens"):
        tokens(TextPrompt(""), encoder=ByteEncoder(add_bos=False))


def test_text_far_longer_than_the_context_is_refused_without_tokenizing_it():
    encoder = ByteEncoder()
    tokenize = tokenizer(encoder, pieces=[*PIECES[:-1], b"longest."]).tokenize
    assert tokenize(TextPrompt("x" * 512), context_tokens=64)
    encoder.texts.clear()
    with pytest.raises(InvalidRequest, match="has 513 bytes, far more than the context of 64 tokens"):
        tokenize(TextPrompt("x" * 513), context_tokens=64)
    assert encoder.texts == []


def test_equal_tokenizers_have_equal_fingerprints():
    assert tokenizer().fingerprint == tokenizer(pieces=tuple(PIECES)).fingerprint
    assert len(tokenizer().fingerprint) == 16
    int(tokenizer().fingerprint, 16)


@pytest.mark.parametrize(
    "other",
    [
        {"encoder": ByteEncoder(add_bos=False)},
        {"encoder": ByteEncoder(splits_special=False)},
        {"encoder": ByteEncoder(other="\u4f60")},
        {"encoder": ByteEncoder(other="12345")},
        {"encoder": ByteEncoder(other="  a")},
        {"encoder": ByteEncoder(other="\u200d")},
        {"encoder": ByteEncoder(other="'re")},
        {"eos": frozenset({EOS, BOS})},
        {"pieces": [*PIECES[:-1], b"x"]},
        {"pieces": [*PIECES, b""]},
        {"pieces": [b"ab", b"c", *PIECES[2:]]},
        {"template": ""},
        {"template": CHATML + " "},
        {"template": "{{ raise_exception('no') }}"},
    ],
)
def test_what_makes_other_tokens_makes_another_fingerprint(other):
    assert tokenizer(**other).fingerprint != tokenizer().fingerprint


def test_pieces_with_other_borders_make_another_fingerprint():
    one, other = (tokenizer(pieces=[first, second, *PIECES[2:]]) for first, second in ((b"ab", b"c"), (b"a", b"bc")))
    assert one.fingerprint != other.fingerprint


def test_templates_that_refuse_for_different_reasons_differ():
    one, other = (tokenizer(template=f"{{{{ raise_exception('{reason}') }}}}") for reason in ("a", "b"))
    assert one.fingerprint != other.fingerprint


def test_a_template_with_the_date_has_the_same_fingerprint_every_day(monkeypatch):
    template = CHATML + "{{ strftime_now('%Y-%m-%d') }}"

    def on(day: int) -> PromptTokenizer:
        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime(2030, 1, day)

        monkeypatch.setattr(chat, "datetime", Clock)
        return tokenizer(template=template)

    assert on(1).fingerprint == on(2).fingerprint
    assert bytes(on(3).tokenize(ChatPrompt((ChatTurn("user", "a"),)), context_tokens=64)[1:]) == b"[user]a2030-01-03"


def test_two_templates_that_differ_in_their_dates_only_have_different_fingerprints():
    one, other = (tokenizer(template=CHATML + f"{{{{ strftime_now('{pattern}') }}}}") for pattern in ("%d %b", "%b %d"))
    assert one.fingerprint != other.fingerprint
