"""What a model of llama.cpp says of itself."""

from __future__ import annotations

import pytest

from backend_service.engines.llama_cpp import LlamaConfig, LlamaCppEngine
from backend_service.engines.llama_model import LlamaModel
from backend_service.kv_pool import PoolLimits
from backend_service.models import locate_model
from tests.integration.engines.tiny_models import TinyVocabulary, tiny_llama, tiny_qwen2


def test_the_packaged_model_says_how_its_weights_are_stored():
    assert LlamaModel(locate_model("default")).precision == "q4_1"


@pytest.mark.parametrize(("matrices", "precision"), [("F32", "f32"), ("F16", "f16"), ("Q8_0", "q8_0")])
def test_without_a_named_file_type_it_is_that_of_most_weights(tmp_path, matrices, precision):
    assert LlamaModel(tiny_llama(tmp_path / "model.gguf", matrices=matrices)).precision == precision


def test_a_named_file_type_goes_first(tmp_path):
    path = tiny_llama(tmp_path / "model.gguf", matrices="Q8_0", metadata={"general.file_type": 17})
    assert LlamaModel(path).precision == "q5_k_m"


def test_models_with_the_same_tokenizer_say_so(tmp_path):
    """Whatever their weights and architecture."""
    one, other = LlamaModel(tiny_llama(tmp_path / "a.gguf")), LlamaModel(tiny_qwen2(tmp_path / "b.gguf"))
    assert one.tokenizer_fingerprint == other.tokenizer_fingerprint
    assert one.fingerprint != other.fingerprint


def test_a_merge_more_is_another_tokenizer(tmp_path):
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    fingerprints = set()
    for merges in (["t h"], ["t h", "h e"]):
        tokens = [*letters, "th", "he", "<|end|>"]
        vocabulary = TinyVocabulary(tokens, [1] * (len(tokens) - 1) + [3], merges)
        model = LlamaModel(tiny_llama(tmp_path / f"{len(merges)}.gguf", vocabulary=vocabulary))
        fingerprints.add(model.tokenizer_fingerprint)
    assert len(fingerprints) == 2


def test_an_engine_passes_on_what_its_model_says(tmp_path):
    model = LlamaModel(tiny_llama(tmp_path / "model.gguf", matrices="F16"))
    info = LlamaCppEngine(model, LlamaConfig(PoolLimits(256, max_live=1))).info
    assert (info.precision, info.tokenizer_fingerprint) == ("f16", model.tokenizer_fingerprint)
