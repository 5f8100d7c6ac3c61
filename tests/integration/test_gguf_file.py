"""Reading metadata and tensor directory of GGUF files, whole and broken."""

from __future__ import annotations

import gguf
import pytest

from backend_service.gguf_file import read_gguf
from service_kit.faults import StartupFailed
from tests.integration.engines.tiny_models import CONTEXT_TOKENS, EMBEDDING, VOCABULARY, tiny_llama


def test_it_says_what_the_reference_reader_says(tmp_path):
    path = tiny_llama(tmp_path / "model.gguf", matrices="Q4_1", metadata={"x.text": "é", "x.int": 7, "x.float": 0.5})
    ours, reference = read_gguf(path), gguf.GGUFReader(path)
    theirs = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == theirs
    assert [
        (tensor.name, tensor.shape, tensor.type.upper(), tensor.offset) for tensor in ours.tensors
    ] == [
        (tensor.name, tuple(reversed(tensor.shape.tolist())), tensor.tensor_type.name, tensor.data_offset)
        for tensor in reference.tensors
    ]  # fmt: skip
    assert ours.metadata["llama.context_length"] == CONTEXT_TOKENS
    assert next(tensor for tensor in ours.tensors if tensor.name == "output.weight").shape == (VOCABULARY, EMBEDDING)


@pytest.mark.parametrize(("matrices", "precision"), [("F32", "f32"), ("F16", "f16"), ("Q8_0", "q8_0")])
def test_precision_is_that_of_most_weights(tmp_path, matrices, precision):
    assert read_gguf(tiny_llama(tmp_path / "model.gguf", matrices=matrices)).precision == precision


def test_a_named_file_type_goes_first(tmp_path):
    path = tiny_llama(tmp_path / "model.gguf", matrices="Q8_0", metadata={"general.file_type": 15})
    assert read_gguf(path).precision == "q4_k_m"
    path = tiny_llama(tmp_path / "newer.gguf", matrices="Q8_0", metadata={"general.file_type": 999})
    assert read_gguf(path).precision == "q8_0"


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path, share):
    path = tiny_llama(tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(StartupFailed, match="may be truncated: fetch it again"):
        read_gguf(path)


def test_other_files_and_versions_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    for content in (
        b"PK\x03\x04" + bytes(64),
        b"GGUF\x01\x00\x00\x00" + bytes(64),
        b"GGUF\x00\x00\x00\x03" + bytes(64),
    ):
        path.write_bytes(content)
        with pytest.raises(StartupFailed, match="no readable GGUF"):
            read_gguf(path)
    with pytest.raises(StartupFailed, match="No such file"):
        read_gguf(tmp_path / "absent.gguf")
