"""Folders of models that are damaged: refused with a sentence, whatever is in them."""

from __future__ import annotations

import json
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_service.engines.mlx_folder import check_folder, folder_fingerprint, stored_precision
from service_kit.faults import StartupFailed

CONFIG = {"model_type": "llama", "quantization": {"bits": 4, "group_size": 32}}
TENSORS = {
    "__metadata__": {"format": "mlx"},
    "a.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
    "b.weight": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
}


def weights(tensors: object, values: bytes = bytes(12)) -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + values


def folder_in(directory: Path, *, config: object = CONFIG, content: bytes | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights(TENSORS) if content is None else content)
    return directory


def looked_at(folder: Path) -> tuple[str, str]:
    """As a backend does before it has MLX read it."""
    return stored_precision(folder, check_folder(folder)), folder_fingerprint(folder)


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        (CONFIG, "4-bit g32"),
        ({"model_type": "llama"}, "bf16"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ],
)
def test_a_whole_one_says_how_it_is_stored(tmp_path, config, precision):
    assert looked_at(folder_in(tmp_path, config=config))[0] == precision


@pytest.mark.parametrize("quantization", [4, "4-bit", [4], True])
def test_a_quantisation_that_says_nothing_is_refused(tmp_path, quantization):
    with pytest.raises(StartupFailed, match="does not say how the weights are quantised; fetch it again"):
        looked_at(folder_in(tmp_path, config={"model_type": "llama", "quantization": quantization}))


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F32", "data_offsets": [0]},
        {"dtype": "F32", "data_offsets": [0, "12"]},
        {"dtype": "F32", "data_offsets": [0, 13]},
        {"dtype": "F32", "data_offsets": [8, 4]},
        {"dtype": "F32", "data_offsets": [-4, 4]},
        {"dtype": 7, "data_offsets": [0, 12]},
        {"data_offsets": [0, 12]},
        {"dtype": "F32"},
        [],
        None,
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path, tensor):
    with pytest.raises(StartupFailed, match="are damaged or cut short"):
        looked_at(folder_in(tmp_path, content=weights({"a.weight": tensor})))


def test_weights_that_are_linked_to_nothing_are_refused(tmp_path):
    folder = folder_in(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(StartupFailed, match="are damaged or cut short"):
        looked_at(folder)


def test_settings_nested_without_end_are_refused(tmp_path):
    folder = folder_in(tmp_path)
    (folder / "config.json").write_text('{"model_type":' * 100_000)
    with pytest.raises(StartupFailed, match="is not an MLX model"):
        looked_at(folder)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["config.json", "model.safetensors"]), st.data())
def test_whatever_happens_to_a_file_it_is_used_or_refused(name, data):
    with tempfile.TemporaryDirectory() as directory:
        folder = folder_in(Path(directory))
        content = bytearray((folder / name).read_bytes())
        for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
            content[place] = data.draw(st.integers(0, 255))
        del content[data.draw(st.integers(0, len(content))) :]
        (folder / name).write_bytes(content)
        with suppress(StartupFailed):
            precision, fingerprint = looked_at(folder)
            assert precision
            assert len(fingerprint) == 16
