"""Random-weight GGUF models of less than 1 MB, one for each kind of architecture that an engine must tell apart.

Their text means nothing, but each next token depends on all that the architecture lets a position see, so a wrong cell
in the KV cache shows. Token ids are bytes (0..255), one merge ("th") and an end token; the tokenizer is GPT-2's BPE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

EMBEDDING = 64
HEADS = 2
KV_HEADS = 1
HEAD = EMBEDDING // HEADS
"""32: the block of q8_0, so that a quantised KV cache works too."""
FEED_FORWARD = 128
LAYERS = 2
CONTEXT_TOKENS = 4096
SLIDING_WINDOW_TOKENS = 16
SSM_CONV = 4
SSM_STATE = 8
SSM_RANK = 4
MERGED = "th"
VOCABULARY = 258
END_TOKEN = VOCABULARY - 1
_LOGIT_SPREAD = 6.0
"""Standard deviation of the logits: ties are rare, and rounding decides nothing."""
_LOUDER = 200.0
"""Norm weight by which a layer drowns the token itself out: tied embeddings would repeat it for ever."""


@dataclass(frozen=True)
class TinyVocabulary:
    """A byte-level BPE. The last token ends an answer."""

    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    pre: str = "default"
    """How text is split into words, by GGUF's name for it."""
    template: str = ""
    add_bos: bool | None = False
    """None: not in the file."""


def tiny_llama(
    path: Path,
    *,
    vocabulary: TinyVocabulary | None = None,
    matrices: str = "F32",
    tied: bool = False,
    rope_factors: Sequence[float] = (),
    metadata: dict[str, str | int | float] | None = None,
) -> Path:
    """Full attention, positions turned in interleaved pairs. `matrices`: GGUF's name for the type of all matrices."""
    model = _TinyModel(path, "llama", seed=5, vocabulary=vocabulary, matrices=matrices)
    model.attention_metadata()
    for key, value in (metadata or {}).items():
        add = {str: model.gguf.add_string, int: model.gguf.add_uint32, float: model.gguf.add_float32}[type(value)]
        add(key, value)
    if tied:
        model.matrix("token_embd", model.vocabulary_size, EMBEDDING, gain=_LOGIT_SPREAD)
        model.norm("output_norm")
    else:
        model.language_model_head()
    if rope_factors:
        model.tensor("rope_freqs.weight", np.array(rope_factors))
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm", weight=_LOUDER if tied else 1.0)
        model.attention(layer)
        model.norm(f"{layer}.ffn_norm")
        model.gated_feed_forward(layer)
    return model.write()


def tiny_qwen2(path: Path) -> Path:
    """Full attention with biases: the common case."""
    model = _TinyModel(path, "qwen2", seed=1)
    model.attention_metadata()
    model.language_model_head()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm")
        model.attention(layer, biases=True)
        model.norm(f"{layer}.ffn_norm")
        model.gated_feed_forward(layer)
    return model.write()


def tiny_gemma2(path: Path) -> Path:
    """A sliding window in every other layer."""
    model = _TinyModel(path, "gemma2", seed=2)
    model.attention_metadata()
    model.gguf.add_sliding_window(SLIDING_WINDOW_TOKENS)
    model.gguf.add_attn_logit_softcapping(50.0)
    model.gguf.add_final_logit_softcapping(30.0)
    model.matrix("token_embd", VOCABULARY, EMBEDDING, gain=_LOGIT_SPREAD)  # also the output: they are tied
    model.norm("output_norm")
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm")
        # Attention to all alike: its mean is small, and made loud by the norm after it.
        model.attention(layer, sharpness=0.7)
        model.norm(f"{layer}.post_attention_norm", weight=_LOUDER)
        model.norm(f"{layer}.ffn_norm")
        model.gated_feed_forward(layer)
        model.norm(f"{layer}.post_ffw_norm", weight=_LOUDER)
    return model.write()


def tiny_mamba(path: Path) -> Path:
    """Recurrent: the state of a sequence cannot be cut at a prefix."""
    inner = 2 * EMBEDDING
    model = _TinyModel(path, "mamba", seed=3)
    model.gguf.add_feed_forward_length(0)
    model.gguf.add_head_count(0)
    model.gguf.add_layer_norm_rms_eps(1e-5)
    model.gguf.add_ssm_conv_kernel(SSM_CONV)
    model.gguf.add_ssm_inner_size(inner)
    model.gguf.add_ssm_state_size(SSM_STATE)
    model.gguf.add_ssm_time_step_rank(SSM_RANK)
    model.language_model_head()
    for layer in model.layers():
        model.norm(f"{layer}.attn_norm")
        model.matrix(f"{layer}.ssm_in", 2 * inner, EMBEDDING)
        model.matrix(f"{layer}.ssm_conv1d", inner, SSM_CONV)
        model.vector(f"{layer}.ssm_conv1d.bias", inner)
        model.matrix(f"{layer}.ssm_x", SSM_RANK + 2 * SSM_STATE, inner)
        model.matrix(f"{layer}.ssm_dt", inner, SSM_RANK)
        model.vector(f"{layer}.ssm_dt.bias", inner)
        # A decay of exp(-a * dt): slow enough that the first tokens of a prompt still count at its end.
        model.tensor(f"{layer}.ssm_a", np.full((inner, SSM_STATE), -0.02))
        model.tensor(f"{layer}.ssm_d", np.ones(inner))
        model.matrix(f"{layer}.ssm_out", EMBEDDING, inner)
    return model.write()


def tiny_bert(path: Path) -> Path:
    """An encoder for embeddings: it generates nothing."""
    model = _TinyModel(path, "bert", seed=4, tokenizer="bert")
    model.gguf.add_feed_forward_length(FEED_FORWARD)
    model.gguf.add_head_count(HEADS)
    model.gguf.add_layer_norm_eps(1e-5)
    model.gguf.add_causal_attention(False)
    model.gguf.add_pooling_type(gguf.PoolingType.MEAN)
    model.matrix("token_embd", VOCABULARY, EMBEDDING)
    model.matrix("token_types", 2, EMBEDDING)
    model.matrix("position_embd", CONTEXT_TOKENS, EMBEDDING)
    model.layer_norm("token_embd_norm")
    for layer in model.layers():
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            model.matrix(f"{layer}.{name}", EMBEDDING, EMBEDDING)
            model.vector(f"{layer}.{name}.bias", EMBEDDING)
        model.layer_norm(f"{layer}.attn_output_norm")
        model.matrix(f"{layer}.ffn_up", FEED_FORWARD, EMBEDDING)
        model.vector(f"{layer}.ffn_up.bias", FEED_FORWARD)
        model.matrix(f"{layer}.ffn_down", EMBEDDING, FEED_FORWARD)
        model.vector(f"{layer}.ffn_down.bias", EMBEDDING)
        model.layer_norm(f"{layer}.layer_output_norm")
    return model.write()


TINY_MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen2": tiny_qwen2,
    "gemma2": tiny_gemma2,
    "mamba": tiny_mamba,
    "bert": tiny_bert,
}


class _TinyModel:
    """A GGUF file in the making. Matrices are (rows out, columns in), as in a checkpoint."""

    def __init__(
        self,
        path: Path,
        architecture: str,
        *,
        seed: int,
        tokenizer: str = "gpt2",
        vocabulary: TinyVocabulary | None = None,
        matrices: str = "F32",
    ) -> None:
        self.gguf = gguf.GGUFWriter(path, architecture)
        self._path = path
        self._random = np.random.default_rng(seed)
        self.gguf.add_name(f"tiny {architecture}")
        self.gguf.add_context_length(CONTEXT_TOKENS)
        self.gguf.add_embedding_length(EMBEDDING)
        self.gguf.add_block_count(LAYERS)
        self.vocabulary_size = len(vocabulary.tokens) if vocabulary else VOCABULARY
        self._matrices = gguf.GGMLQuantizationType[matrices]
        if vocabulary:
            self._given_tokenizer(vocabulary)
        else:
            self._tokenizer(tokenizer)

    def layers(self) -> Iterator[str]:
        return (f"blk.{layer}" for layer in range(LAYERS))

    def attention_metadata(self) -> None:
        self.gguf.add_feed_forward_length(FEED_FORWARD)
        self.gguf.add_head_count(HEADS)
        self.gguf.add_head_count_kv(KV_HEADS)
        self.gguf.add_key_length(HEAD)
        self.gguf.add_value_length(HEAD)
        self.gguf.add_layer_norm_rms_eps(1e-5)
        self.gguf.add_rope_freq_base(10000.0)

    def language_model_head(self) -> None:
        self.matrix("token_embd", self.vocabulary_size, EMBEDDING, gain=8.0)
        self.norm("output_norm")
        self.matrix("output", self.vocabulary_size, EMBEDDING, gain=_LOGIT_SPREAD)

    def attention(self, layer: str, *, sharpness: float = 1.5, biases: bool = False) -> None:
        """`sharpness`: the higher, the fewer others a position looks at."""
        for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)):
            self.matrix(f"{layer}.{name}", heads * HEAD, EMBEDDING, gain=1.0 if name == "attn_v" else sharpness)
            if biases:
                self.vector(f"{layer}.{name}.bias", heads * HEAD)
        self.matrix(f"{layer}.attn_output", EMBEDDING, HEADS * HEAD, gain=2.0)

    def gated_feed_forward(self, layer: str) -> None:
        self.matrix(f"{layer}.ffn_gate", FEED_FORWARD, EMBEDDING)
        self.matrix(f"{layer}.ffn_up", FEED_FORWARD, EMBEDDING)
        self.matrix(f"{layer}.ffn_down", EMBEDDING, FEED_FORWARD)

    def matrix(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        """Random; of unit inputs it makes outputs of standard deviation `gain`."""
        values = self._random.normal(0.0, gain / np.sqrt(columns), (rows, columns))
        if self._matrices == gguf.GGMLQuantizationType.F32:
            self.tensor(f"{name}.weight", values)
        else:
            packed = gguf.quants.quantize(values.astype(np.float32), self._matrices)
            self.gguf.add_tensor(f"{name}.weight", packed, raw_dtype=self._matrices)

    def vector(self, name: str, size: int) -> None:
        self.tensor(name, self._random.normal(0.0, 0.1, size))

    def norm(self, name: str, *, weight: float = 1.0) -> None:
        self.tensor(f"{name}.weight", np.full(EMBEDDING, weight))

    def layer_norm(self, name: str) -> None:
        self.norm(name)
        self.vector(f"{name}.bias", EMBEDDING)

    def tensor(self, name: str, values: np.ndarray) -> None:
        self.gguf.add_tensor(name, values.astype(np.float32))

    def write(self) -> Path:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()
        return self._path

    def _given_tokenizer(self, vocabulary: TinyVocabulary) -> None:
        self.gguf.add_tokenizer_model("gpt2")
        self.gguf.add_tokenizer_pre(vocabulary.pre)
        self.gguf.add_token_list(list(vocabulary.tokens))
        self.gguf.add_token_types(list(vocabulary.types))
        self.gguf.add_token_merges(list(vocabulary.merges))
        self.gguf.add_bos_token_id(len(vocabulary.tokens) - 1)
        self.gguf.add_eos_token_id(len(vocabulary.tokens) - 1)
        if vocabulary.template:
            self.gguf.add_chat_template(vocabulary.template)
        if vocabulary.add_bos is not None:
            self.gguf.add_add_bos_token(vocabulary.add_bos)

    def _tokenizer(self, kind: str) -> None:
        self.gguf.add_tokenizer_model(kind)
        self.gguf.add_tokenizer_pre("default")
        control = gguf.TokenType.CONTROL
        if kind == "bert":
            specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
            words = [f"\u2581{chr(0x4E00 + index)}" for index in range(VOCABULARY - len(specials))]
            tokens, types = specials + words, [control] * len(specials) + [gguf.TokenType.NORMAL] * len(words)
            self.gguf.add_token_type_count(2)
            for name, value in (("padding", 0), ("unknown", 1), ("seperator", 3)):
                self.gguf.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
            self.gguf.add_uint32("tokenizer.ggml.cls_token_id", 2)
        else:
            tokens = [*_byte_characters(), MERGED, "<|end|>"]
            types = [*[gguf.TokenType.NORMAL] * (VOCABULARY - 1), control]
            self.gguf.add_token_merges([f"{MERGED[0]} {MERGED[1]}"])
            self.gguf.add_bos_token_id(END_TOKEN)
            self.gguf.add_eos_token_id(END_TOKEN)
            self.gguf.add_add_bos_token(False)
        self.gguf.add_token_list(tokens)
        self.gguf.add_token_types(types)


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in GPT-2's byte-level BPE: printable Latin-1 is itself, the rest is counted
    up from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
