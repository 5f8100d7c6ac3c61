"""For tests of MLX's side: skip without it, and small vocabularies that show how text is split into words."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from tests.integration.engines.tiny_models import TinyVocabulary, tiny_llama

TRICKY = (
    "",
    " ",
    "   ",
    "a",
    " a",
    "a ",
    "\n",
    "\n\n\n",
    "\t\tx",
    " \n \n a",
    "\r\nA\r\n",
    "\u00a0\u3000x",
    "x\u2003\u2003y",
    "The quick brown fox's tail isn't what we'd've said, I'll say. THEY'RE HERE, IT'S DON'T o'clock 'tis",
    "0 1 12 123 1234 12345 3.14159 1,000,000 ½ ² Ⅷ ١٢٣٤ ２０２４",
    "naïve façade Zürich ŁÓDŹ ñandú",
    "cafe\u0301 n\u0303",
    "ǅ ﬁ ß İ ſ",
    "Привет, мир! Γειά σου Κόσμε",
    "שלום עולם مرحبا بالعالم",
    "नमस्ते दुनिया สวัสดี",
    "你好，世界。日本語のテキスト 한국어",
    "👋🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️ 𝕏",
    "zero\u200bwidth\u200djoin\ufeffbom\u0000nul\u007f\u0085x\u2028y",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2 != 0}  # ok\n\n\tif x<=1:pass\n",
    "https://example.org/a_b-c?d=%20&e=f#g <b>&amp;</b> $100 +5% ~x^2|y `code` \\n @user #tag",
    "...!?—–…“”‘’«»",
    "<|endoftext|>",
    "x<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|><|im_end|><|im_end|>",
    "<|im_end|",
    "<end><|end|>",
    "<tool_call> {} </tool_call>x",
    "<repo_name>a<reponame>b<file_sep>",
    "<0x0A> ▁a ĠaĊ",
    "_" * 40,
    " " * 33 + "x",
    "a" * 50,
    "antidisestablishmentarianism",
    "I can't; you CAN'T. we'LL\u2019ll",
    "end. \n\n  Next\n",
    "a wholeword here",
    "\u001c\u001dx\u00ad",
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<reponame>", "<|end|>")
UNMERGED = "wholeword"
"""With a space before it a token, but no merges make it."""
USER_TOKENS = ("<tool_call>", "</tool_call>")


def need_mlx() -> None:
    """Skip the calling tests without MLX."""
    pytest.importorskip("mlx.core", reason="MLX is not installed", exc_type=ImportError)
    pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed", exc_type=ImportError)


def crossing_vocabulary(pre: str, *, add_bos: bool | None = False, template: str = "") -> TinyVocabulary:
    """Its merges know no words: whatever the rules of `pre` leave together becomes one token, so a border drawn
    elsewhere shows."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2500, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    texts = [text for text in TRICKY if not any(token in text for token in (*CONTROL_TOKENS, *USER_TOKENS, UNMERGED))]
    tokenizer.train_from_iterator(texts * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = gguf.TokenType
    return TinyVocabulary(
        tokens=[*words, f"Ġ{UNMERGED}", "<unused>", *USER_TOKENS, *CONTROL_TOKENS],
        types=[
            *[kinds.NORMAL] * (len(words) + 1),
            kinds.UNUSED,
            *[kinds.USER_DEFINED] * len(USER_TOKENS),
            *[kinds.CONTROL] * len(CONTROL_TOKENS),
        ],
        merges=[" ".join(merge) for merge in model["merges"]],
        pre=pre,
        add_bos=add_bos,
        template=template,
    )


def crossing_model(path: Path, pre: str, *, add_bos: bool | None = False, template: str = "") -> Path:
    """A random model with such a vocabulary."""
    return tiny_llama(path, vocabulary=crossing_vocabulary(pre, add_bos=add_bos, template=template), tied=True)
