"""Tokenizers as hubs have them, given the behaviour of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="MLX's tokenizers are not installed", exc_type=ImportError)
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from backend_service.engines.mlx_tokenizer import MlxTokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*special: str, text: tuple[str, ...] = (), bos: str = "") -> Tokenizer:
    """A token a byte, then added tokens: special ones, and those that are text."""
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(ALPHABET)}, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in text])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def sentence_piece() -> Tokenizer:
    """A word mark before each word, bytes for what has no token."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "a", "b", "▁a"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(words)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in words[:3]])
    return tokenizer


def load(folder: Path, tokenizer: Tokenizer, *, size: int = 300, **files: Any) -> MlxTokenizer:
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return MlxTokenizer(folder, vocabulary_size=size)


def text_of(tokenizer: MlxTokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.vocabulary.pieces[token] for token in ids)


@pytest.mark.parametrize("text", ["a b", " é\n", "日本", "\x00\x7f", "👍🏽"])
def test_pieces_are_the_bytes_that_tokens_stand_for(tmp_path, text):
    tokenizer = load(tmp_path, byte_level())
    ids = tokenizer.encode(text, parse_special=False, add_special=False)
    assert text_of(tokenizer, ids) == text.encode()


def test_pieces_of_word_marks_and_byte_tokens(tmp_path):
    tokenizer = load(tmp_path, sentence_piece(), size=264)
    ids = tokenizer.encode("a b é", parse_special=False, add_special=False)
    assert text_of(tokenizer, ids) == " a b é".encode()
    assert tokenizer.vocabulary.pieces[:4] == [b"", b"", b"", b"\x00"]


def test_control_tokens_and_padding_have_no_bytes(tmp_path):
    tokenizer = load(tmp_path, byte_level("<x>", text=("<tool_call>",)), size=300)
    assert len(tokenizer.vocabulary.pieces) == 300
    assert tokenizer.vocabulary.pieces[256:] == [b"", b"<tool_call>", *[b""] * 42]


def test_special_tokens_count_where_they_are_to(tmp_path):
    tokenizer = load(tmp_path, byte_level("<x>", text=("<tool_call>",)))
    assert tokenizer.encode("<x>", parse_special=True, add_special=False) == [256]
    assert text_of(tokenizer, tokenizer.encode("<x>", parse_special=False, add_special=False)) == b"<x>"
    assert tokenizer.encode("<tool_call>", parse_special=False, add_special=False) == [257], "it is text"


def test_added_tokens_that_look_special_are(tmp_path):
    """Converters to GGUF take them for control tokens, so llama.cpp does."""
    tokenizer = load(tmp_path, byte_level(text=("<|fim_prefix|>",)))
    assert tokenizer.vocabulary.pieces[256] == b""
    assert len(tokenizer.encode("<|fim_prefix|>", parse_special=False, add_special=False)) == 14
    assert tokenizer.encode("<|fim_prefix|>", parse_special=True, add_special=False) == [256]


def test_text_is_taken_as_it_comes(tmp_path):
    tokenizer = load(tmp_path, byte_level())
    ids = tokenizer.encode("e\u0301", parse_special=False, add_special=False)
    assert text_of(tokenizer, ids) == "e\u0301".encode()


@pytest.mark.parametrize(
    ("config", "begun"),
    [
        ({}, True),
        ({"bos_token": "<x>"}, True),
        ({"bos_token": "<x>", "add_bos_token": True}, True),
        ({"bos_token": "<x>", "add_bos_token": False}, False),
        ({"bos_token": None, "add_bos_token": True}, False),
    ],
)
def test_a_begin_token_is_added_as_the_model_says(tmp_path, config, begun):
    tokenizer = load(tmp_path, byte_level("<x>", bos="<x>"), tokenizer_config=config)
    inner = tokenizer.encode("a", parse_special=False, add_special=False)
    assert len(inner) == 1
    assert tokenizer.encode("a", parse_special=False, add_special=True) == [256] * begun + inner


def test_a_begin_token_that_nobody_asks_for_is_not_added(tmp_path):
    tokenizer = load(tmp_path, byte_level("<x>"), tokenizer_config={"bos_token": {"content": "<x>"}})
    assert tokenizer.bos == "<x>"
    assert len(tokenizer.encode("a", parse_special=False, add_special=True)) == 1


@pytest.mark.parametrize(
    ("special", "files", "ends"),
    [
        (("<x>",), {"config": {"eos_token_id": 7}}, {7}),
        (("<x>",), {"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [8, 9]}}, {8, 9}),
        (("<x>",), {"config": {"eos_token_id": None}}, set()),
        (("<x>",), {"tokenizer_config": {"eos_token": "<x>"}}, {256}),
        (("<x>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>"), {"config": {"eos_token_id": 999}}, {257, 258, 259}),
        (("<|repo_name|>", "<|fim_repo|>", "<|fim_pad|>", "<|file_sep|>"), {}, {257, 258, 259}),
        (("<|end|>",), {}, {256}),
        (("<|end|>", "<|return|>", "<|call|>"), {}, {257, 258}),
    ],
)
def test_all_tokens_that_end_an_answer_do(tmp_path, special, files, ends):
    assert load(tmp_path, byte_level(*special), **files).vocabulary.eos == ends


def test_the_chat_template_is_found_wherever_it_is(tmp_path):
    tokenizer = byte_level()
    assert load(tmp_path, tokenizer).template == ""
    assert load(tmp_path, tokenizer, tokenizer_config={"chat_template": "one"}).template == "one"
    several = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert load(tmp_path, tokenizer, tokenizer_config={"chat_template": several}).template == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert load(tmp_path, tokenizer).template == "four"
