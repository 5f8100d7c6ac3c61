"""MLX's models beside llama.cpp's of the same file: what they compute, what they are called, how they tokenize."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from backend_service.engines.llama_model import LlamaModel
from backend_service.models import locate_model
from service_kit.faults import InvalidRequest, StartupFailed
from service_kit.requests import ChatPrompt, ChatTurn, TextPrompt, TokenPrompt
from tests.integration.engines.tiny_models import HEAD, KV_HEADS, LAYERS, VOCABULARY, tiny_llama, tiny_qwen2
from tests.integration.mlx_kit import TRICKY, crossing_model, need_mlx

need_mlx()
import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from backend_service.engines.mlx_gguf import convert  # noqa: E402
from backend_service.engines.mlx_model import MlxModel, memory_shortage  # noqa: E402

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 200, 60)]
CHAT = ChatPrompt((ChatTurn("user", "What is the capital of France?"),))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("mlx")


@pytest.fixture(scope="module")
def packaged(cache) -> tuple[LlamaModel, MlxModel]:
    path = locate_model("default")
    return LlamaModel(path), MlxModel(path, device="cpu", cache=cache)


def last_logits(model: MlxModel, tokens: list[int]) -> NDArray[np.float32]:
    logits = model.module(mx.array([tokens], mx.int32), cache=make_prompt_cache(model.module))
    assert logits.shape == (1, len(tokens), model.vocabulary_size)
    return np.array(logits[0, -1].astype(mx.float32))


def llama_logits(path: Path, tokens: list[int]) -> NDArray[np.float32]:
    model = LlamaModel(path)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads = 512, 1
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model.pointer, params)
    ids = (llama_cpp.llama_token * len(tokens))(*tokens)
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(tokens))) == 0
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (model.vocabulary.size,)).copy()
    llama_cpp.llama_free(context)
    return logits


def llama3_factors(factor: float = 8.0, base: float = 10000.0, trained: int = 8192) -> list[float]:
    """As a converter writes them: long waves by the factor, short ones by one, between 1 and 4 turns in part."""
    factors = []
    for index in range(0, HEAD, 2):
        turns = trained / (2 * math.pi * base ** (index / HEAD))
        smooth = min(max((turns - 1) / 3, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(tiny_qwen2, id="qwen2"),
        pytest.param(tiny_llama, id="llama"),
        pytest.param(lambda path: tiny_llama(path, tied=True), id="llama, tied"),
        pytest.param(
            lambda path: tiny_llama(
                path, metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
            ),
            id="llama, linear positions",
        ),
        pytest.param(lambda path: tiny_llama(path, rope_factors=llama3_factors()), id="llama 3 positions"),
    ],
)
def test_a_converted_model_computes_what_llama_cpp_does(tmp_path, build):
    path = build(tmp_path / "model.gguf")
    model = MlxModel(path, device="cpu", cache=tmp_path / "cache")
    np.testing.assert_allclose(last_logits(model, TOKENS * 6), llama_logits(path, TOKENS * 6), atol=1e-3)


def test_the_packaged_model_answers_sanely(packaged):
    model = packaged[1]
    cache, answer = make_prompt_cache(model.module), b""
    tokens = list(model.tokenize(CHAT, context_tokens=1000))
    while True:
        logits = model.module(mx.array([tokens], mx.int32), cache=cache)
        tokens = [int(mx.argmax(logits[0, -1]).item())]
        if tokens[0] in model.vocabulary.eos:
            break
        answer += model.vocabulary.pieces[tokens[0]]
        assert len(answer) < 100
    assert b"Paris" in answer


def test_the_packaged_model_is_called_the_same_in_both_engines(packaged):
    llama, ours = packaged
    assert ours.name == llama.name == "SmolLM2-135M-Instruct.Q4_1"
    assert ours.fingerprint == llama.fingerprint
    assert ours.tokenizer_fingerprint == llama.tokenizer_fingerprint
    assert ours.train_context_tokens == llama.train_context_tokens == 8192
    assert (llama.precision, ours.precision) == ("q4_1", "q4_1 as f32")
    assert (ours.device, ours.device_name) == ("cpu", "")


def test_the_packaged_model_has_the_same_vocabulary_in_both_engines(packaged):
    llama, ours = packaged
    assert ours.vocabulary.pieces == llama.vocabulary.pieces
    assert ours.vocabulary.eos == llama.vocabulary.eos
    assert {ours.vocabulary.pieces[token] for token in ours.vocabulary.eos} == {b""}
    assert ours.vocabulary_size == 49152


@pytest.mark.parametrize("text", [text for text in TRICKY if text])
def test_the_packaged_model_tokenizes_the_same_in_both_engines(packaged, text):
    llama, ours = (
        [
            model.tokenize(prompt, context_tokens=1000)
            for prompt in (TextPrompt(text), ChatPrompt((ChatTurn("user", text),)))
        ]
        for model in packaged
    )
    assert ours == llama


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "qwen2", "llama-bpe"])
@pytest.mark.parametrize("add_bos", [False, True, None])
def test_rules_for_words_are_those_of_llama_cpp(tmp_path, pre, add_bos):
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    path = crossing_model(tmp_path / "model.gguf", pre, add_bos=add_bos, template=template)
    llama, ours = LlamaModel(path), MlxModel(path, device="cpu", cache=tmp_path / "cache")
    for text in filter(None, TRICKY):
        for prompt in (TextPrompt(text), ChatPrompt((ChatTurn("user", text),))):
            expected = llama.tokenize(prompt, context_tokens=1000)
            assert ours.tokenize(prompt, context_tokens=1000) == expected, (text, prompt)
    assert ours.vocabulary == llama.vocabulary
    assert ours.tokenizer_fingerprint == llama.tokenizer_fingerprint


def test_tokenizers_that_split_words_otherwise_have_other_fingerprints(tmp_path):
    fingerprints = {
        LlamaModel(crossing_model(tmp_path / f"{pre}.gguf", pre)).tokenizer_fingerprint
        for pre in ("default", "gpt-2", "smollm", "qwen2", "llama-bpe")
    }
    assert len(fingerprints) == 5


def test_a_small_model_has_the_same_tokenizer_in_both_engines(tmp_path):
    path = tiny_qwen2(tmp_path / "model.gguf")
    llama, ours = LlamaModel(path), MlxModel(path, device="cpu", cache=tmp_path / "cache")
    assert ours.tokenizer_fingerprint == llama.tokenizer_fingerprint
    assert ours.vocabulary == llama.vocabulary
    assert (ours.fingerprint, ours.precision) == (llama.fingerprint, llama.precision) == (llama.fingerprint, "f32")


@pytest.mark.parametrize(
    ("weights", "precision", "kind", "kv_bytes"),
    [
        ("auto", "q4_1 as f32", mx.float32, 4),
        ("float32", "q4_1 as f32", mx.float32, 4),
        ("bfloat16", "q4_1 as bf16", mx.bfloat16, 2),
        ("stored", "q4_1", mx.float32, 4),
    ],
)
def test_weights_are_held_as_asked(tmp_path, weights, precision, kind, kv_bytes):
    path = tiny_llama(tmp_path / "model.gguf", matrices="Q4_1")
    model = MlxModel(path, device="cpu", cache=tmp_path / "cache", weights=weights, name="mine")
    assert (model.precision, model.name) == (precision, "mine")
    assert model.kv_bytes_per_token == 2 * LAYERS * KV_HEADS * HEAD * kv_bytes
    projection = model.module.model.layers[0].self_attn.q_proj
    assert ("scales" in projection) == (weights == "stored")
    assert (projection.scales if weights == "stored" else projection.weight).dtype == kind
    reference = last_logits(MlxModel(path, device="cpu", cache=tmp_path / "cache"), TOKENS)
    np.testing.assert_allclose(last_logits(model, TOKENS), reference, atol=1e-3 if kind == mx.float32 else 1.0)


@pytest.mark.parametrize("matrices", ["F16", "Q4_0", "Q4_1", "Q8_0"])
def test_weights_in_float32_are_exactly_what_the_file_stands_for(tmp_path, matrices):
    path = tiny_llama(tmp_path / "model.gguf", matrices=matrices)
    model = MlxModel(path, device="cpu", cache=tmp_path / "cache")
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.attn_v.weight")
    held = np.array(model.module.model.layers[1].self_attn.v_proj.weight)
    np.testing.assert_array_equal(held, gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def test_all_arrays_are_in_memory_so_other_threads_may_use_them(tmp_path):
    """A lazy array can be computed on the thread that made it only."""
    path = tiny_llama(tmp_path / "model.gguf", rope_factors=llama3_factors())
    model = MlxModel(path, device="cpu", cache=tmp_path / "cache")
    sums: dict[str, float] = {}

    def add_up() -> None:
        for path, part in model.module.named_modules():
            for name, value in part.items():
                if isinstance(value, mx.array):
                    sums[f"{path}.{name}"] = float(value.sum().item())

    thread = threading.Thread(target=add_up)
    thread.start()
    thread.join()
    for name in ("q_proj.weight", "rope._freqs"):
        assert {f"model.layers.{layer}.self_attn.{name}" for layer in range(LAYERS)} <= sums.keys()


def test_bad_prompts_are_refused_as_by_llama_cpp(tmp_path):
    path = tiny_qwen2(tmp_path / "model.gguf")
    llama, ours = LlamaModel(path), MlxModel(path, device="cpu", cache=tmp_path / "cache")
    for prompt in (TokenPrompt((VOCABULARY,)), TextPrompt(""), TextPrompt("x" * 1000), CHAT):
        refusals = []
        for model in (llama, ours):
            with pytest.raises(InvalidRequest) as refusal:
                model.tokenize(prompt, context_tokens=10)
            refusals.append(str(refusal.value))
        assert refusals[0] == refusals[1]


def test_a_folder_is_taken_as_it_is(tmp_path):
    converted = convert(
        tiny_llama(tmp_path / "model.gguf", matrices="F16"), tmp_path / "cache", progress=lambda _: None
    )
    folder = converted.rename(tmp_path / "folder")
    (folder / "phaseroute.json").unlink()
    model = MlxModel(folder, device="cpu", cache=tmp_path / "cache")
    assert (model.name, model.precision) == ("folder", "f16 as f32")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    assert MlxModel(folder, device="cpu", cache=tmp_path / "cache").fingerprint != model.fingerprint


def test_a_quantised_folder_says_how(tmp_path):
    path = tiny_llama(tmp_path / "model.gguf", matrices="Q8_0")
    folder = convert(path, tmp_path / "cache", progress=lambda _: None).rename(tmp_path / "folder")
    (folder / "phaseroute.json").unlink()
    stored = MlxModel(folder, device="cpu", cache=tmp_path / "cache", weights="stored")
    assert stored.precision == "8-bit g32"


def test_memory_is_checked_before_it_is_taken():
    assert memory_shortage(weight_bytes=600 << 20, kv_bytes=400 << 20, available_bytes=1000 << 20) == ""
    message = memory_shortage(weight_bytes=600 << 20, kv_bytes=401 << 20, available_bytes=1000 << 20)
    assert message.startswith("The model needs 1001 MiB of memory (600 for weights, 401 for the KV cache) and 1000 MiB")
    assert "--weights stored" in message
    assert "--kv-tokens" in message


def test_a_cache_that_does_not_fit_is_refused_with_both_numbers(tmp_path):
    path = tiny_llama(tmp_path / "model.gguf")
    tokens = (1 << 50) // (2 * LAYERS * KV_HEADS * HEAD * 4)
    with pytest.raises(StartupFailed, match=r"needs 1073741\d{3} MiB of memory .* and \d+ MiB are available"):
        MlxModel(path, device="cpu", cache=tmp_path / "cache", kv_tokens=tokens)


def test_a_gpu_that_is_not_there_is_refused(tmp_path):
    if mx.is_available(mx.gpu):
        pytest.skip("there is one")
    with pytest.raises(StartupFailed, match="MLX finds no GPU here"):
        MlxModel(tiny_llama(tmp_path / "model.gguf"), device="gpu", cache=tmp_path / "cache")
