"""GGUF files converted for MLX: without loss, once, or refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from backend_service.models import fingerprint, locate_model
from service_kit.faults import StartupFailed
from tests.integration.engines.tiny_models import HEAD, TINY_MODELS, tiny_llama, tiny_qwen2
from tests.integration.mlx_kit import crossing_model, need_mlx

need_mlx()
from backend_service.engines.folder_cache import damage, manifest  # noqa: E402
from backend_service.engines.mlx_gguf import convert  # noqa: E402

ROOT = Path(__file__).parents[2]


def quietly(_step: str) -> None:
    """Progress that nobody wants."""


def dense(folder: Path, names: set[str]) -> dict[str, np.ndarray]:
    """Tensors as float32, by the rule that mlx documents: scale * value + bias."""
    import mlx.core as mx

    weights = mx.load(str(folder / "model.safetensors"))
    tensors = {}
    for name in names:
        values, stem = weights[name], name.removesuffix(".weight")
        if f"{stem}.scales" in weights:
            scales, biases = (np.array(weights[f"{stem}.{part}"], np.float32) for part in ("scales", "biases"))
            bits = values.shape[-1] // scales.shape[-1]  # words of a group of 32 values
            words = np.array(values)[..., None]
            unpacked = (words >> np.arange(0, 32, bits, dtype=np.uint32)) & (2**bits - 1)
            grouped = unpacked.reshape(*scales.shape, 32).astype(np.float32)
            values = mx.array((grouped * scales[..., None] + biases[..., None]).reshape(values.shape[0], -1))
        tensors[name] = np.array(values.astype(mx.float32))
    return tensors


def assert_lossless(path: Path, folder: Path, names: dict[str, str]) -> None:
    tensors = dense(folder, set(names.values()))
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name in names:
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(tensors[names[tensor.name]], expected, err_msg=tensor.name)


TINY_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    "blk.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
}


@pytest.mark.parametrize("matrices", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_weights_are_taken_over_without_loss(tmp_path, matrices):
    path = tiny_llama(tmp_path / "model.gguf", matrices=matrices)
    folder = convert(path, tmp_path / "cache", progress=quietly)
    assert_lossless(path, folder, TINY_NAMES)
    assert manifest(folder)["precision"] == matrices.lower()


def test_the_packaged_model_is_taken_over_without_loss(tmp_path):
    path = locate_model("default")
    folder = convert(path, tmp_path, progress=quietly)
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    assert_lossless(path, folder, names)
    assert (manifest(folder)["precision"], manifest(folder)["fingerprint"]) == ("q4_1", fingerprint(path))


def test_a_model_is_converted_once(tmp_path):
    path, steps = tiny_llama(tmp_path / "model.gguf"), []
    folder = convert(path, tmp_path / "cache", progress=steps.append)
    assert steps
    steps.clear()
    path = path.rename(tmp_path / "renamed.gguf")
    assert convert(path, tmp_path / "cache", progress=steps.append) == folder
    assert steps == []


def test_models_of_other_contents_are_kept_apart(tmp_path):
    one, other = tiny_llama(tmp_path / "a.gguf"), tiny_llama(tmp_path / "b.gguf", matrices="F16")
    assert convert(one, tmp_path / "cache", progress=quietly) != convert(other, tmp_path / "cache", progress=quietly)


def test_a_damaged_conversion_is_made_anew(tmp_path):
    path = tiny_llama(tmp_path / "model.gguf")
    folder = convert(path, tmp_path / "cache", progress=quietly)
    weights = folder / "model.safetensors"
    whole = fingerprint(weights)
    os.truncate(weights, weights.stat().st_size // 2)
    assert convert(path, tmp_path / "cache", progress=quietly) == folder
    assert (fingerprint(weights), damage(folder)) == (whole, "")


CONVERTING = """
import os, signal, sys
from pathlib import Path
from backend_service.engines.mlx_gguf import convert

def progress(step):
    print(step, flush=True)
    if sys.argv[3:] and step.startswith("writing"):
        os.kill(os.getpid(), signal.SIGKILL)

convert(Path(sys.argv[1]), Path(sys.argv[2]), progress=progress)
"""


def converting(path: Path, cache: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONVERTING, str(path), str(cache), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_processes_that_convert_at_once_share_one_conversion(tmp_path):
    path, cache = tiny_llama(tmp_path / "model.gguf"), tmp_path / "cache"
    processes = [converting(path, cache) for _ in range(3)]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("repacking" in output for output in outputs) == 1
    (folder,) = (entry for entry in cache.iterdir() if entry.name != ".lock")
    assert damage(folder) == ""


def test_a_killed_conversion_is_never_used(tmp_path):
    path, cache = tiny_llama(tmp_path / "model.gguf"), tmp_path / "cache"
    process = converting(path, cache, "kill")
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGKILL
    assert [entry for entry in cache.iterdir() if entry.name != ".lock"], "nothing was begun"
    folder = convert(path, cache, progress=quietly)
    assert damage(folder) == ""
    assert [entry for entry in cache.iterdir() if entry.name != ".lock"] == [folder]


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path):
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n" + CONVERTING
    command = [sys.executable, "-B", "-c", script, str(tiny_llama(tmp_path / "model.gguf")), str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "StartupFailed: A model cannot be converted into" in done.stderr
    assert "free some space" in done.stderr
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("architecture", ["gemma2", "mamba", "bert"])
def test_other_architectures_are_refused(tmp_path, architecture):
    path = TINY_MODELS[architecture](tmp_path / "model.gguf")
    with pytest.raises(StartupFailed, match=f"is a model of architecture {architecture}, which the MLX engine cannot"):
        convert(path, tmp_path / "cache", progress=quietly)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("matrices", ["Q5_0", "Q5_1"])
def test_quantisations_that_mlx_would_round_are_refused(tmp_path, matrices):
    path = tiny_llama(tmp_path / "model.gguf", matrices=matrices)
    says = (
        rf"weights of type {matrices.lower()} \(.*\), which MLX cannot take over without loss; choose a file in .*Q4_0"
    )
    with pytest.raises(StartupFailed, match=says):
        convert(path, tmp_path / "cache", progress=quietly)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "scales positions by the method yarn"),
        ({"llama.expert_count": 8}, "sets llama.expert_count to 8"),
        ({"split.count": 3}, "is one of 3 parts"),
        ({"llama.logit_scale": 0.5}, "sets llama.logit_scale to 0.5"),
        ({"llama.rope.dimension_count": HEAD // 2}, f"attention heads of {HEAD} values and rope.dimension_count"),
    ],
)
def test_what_has_no_counterpart_is_refused(tmp_path, metadata, says):
    path = tiny_llama(tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(StartupFailed, match=says):
        convert(path, tmp_path / "cache", progress=quietly)


def test_unknown_position_factors_are_refused(tmp_path):
    path = tiny_llama(tmp_path / "model.gguf", rope_factors=[1.0] * (HEAD // 2 - 1) + [3.0])
    with pytest.raises(StartupFailed, match="rope_freqs"):
        convert(path, tmp_path / "cache", progress=quietly)


def test_rules_for_words_that_are_not_known_are_refused(tmp_path):
    path = crossing_model(tmp_path / "model.gguf", "tekken")
    with pytest.raises(StartupFailed, match="by the rules 'tekken', which the MLX engine does not know"):
        convert(path, tmp_path / "cache", progress=quietly)


def test_tokenizers_of_another_kind_are_refused(tmp_path):
    path = tiny_qwen2(tmp_path / "model.gguf")
    content = path.read_bytes()
    kind = b"\x04" + bytes(7) + b"gpt2"
    assert content.count(kind) == 1
    path.write_bytes(content.replace(kind, b"\x04" + bytes(7) + b"bert"))
    with pytest.raises(StartupFailed, match="a tokenizer of kind 'bert'"):
        convert(path, tmp_path / "cache", progress=quietly)


def test_a_truncated_file_is_refused(tmp_path):
    path = tiny_llama(tmp_path / "model.gguf")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(StartupFailed, match="may be truncated"):
        convert(path, tmp_path / "cache", progress=quietly)
