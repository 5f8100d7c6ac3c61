"""Model folders and installations that MLX cannot use: each is refused with what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service_kit.faults import StartupFailed
from tests.integration.engines.tiny_models import TINY_MODELS, VOCABULARY, tiny_llama
from tests.integration.mlx_kit import need_mlx

need_mlx()
import mlx.core as mx  # noqa: E402

from backend_service.engines.mlx_gguf import convert  # noqa: E402
from backend_service.engines.mlx_model import MlxModel  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A folder as a hub has it."""
    directory = tmp_path_factory.mktemp("good")
    folder = convert(tiny_llama(directory / "model.gguf"), directory, progress=lambda _step: None)
    (folder / "phaseroute.json").unlink()
    return folder


@pytest.fixture
def folder(good, tmp_path) -> Path:
    return shutil.copytree(good, tmp_path / "folder")


def load(path: Path) -> MlxModel:
    return MlxModel(path, device="cpu", cache=path.parent / "cache")


def edit(name: str, change: Callable[[dict], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def drop_a_tensor(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    weights.pop("model.layers.1.mlp.up_proj.weight")
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def use_another_tokenizer(folder: Path) -> None:
    """One with more tokens than the model has."""
    change = edit("tokenizer.json", lambda content: content["model"]["vocab"].update({"more": VOCABULARY}))
    change(folder)


BROKEN = {
    "no config": (remove("config.json"), r"is not an MLX model: its config\.json cannot be read \(No such file"),
    "config is no JSON": (truncate("config.json", 10), r"its config\.json cannot be read"),
    "config names no model": (edit("config.json", lambda config: config.pop("model_type")), "names no model_type"),
    "unknown model": (
        edit("config.json", lambda config: config.update(model_type="abacus")),
        r"cannot be loaded by mlx-lm \(Model type abacus not supported\.\)",
    ),
    "code of its own": (
        edit("config.json", lambda config: config.update(model_file="model.py")),
        "cannot be loaded by mlx-lm",
    ),
    "config lacks sizes": (edit("config.json", lambda config: config.pop("hidden_size")), "hidden_size"),
    "other sizes": (edit("config.json", lambda config: config.update(hidden_size=32, head_dim=16)), "shape"),
    "no weights": (remove("model.safetensors"), r"has no weights \(model\*\.safetensors\)"),
    "weights cut short": (truncate("model.safetensors", 100_000), r"damaged or cut short \(it has 100000 bytes"),
    "weights cut to nothing": (truncate("model.safetensors", 4), "damaged or cut short"),
    "header cut short": (truncate("model.safetensors", 100), "damaged or cut short"),
    "a tensor is missing": (drop_a_tensor, r"Missing 1 parameters"),
    "no tokenizer": (remove("tokenizer.json"), r"tokenizer\.json cannot be read \(No such file"),
    "tokenizer is no JSON": (truncate("tokenizer.json", 100), r"tokenizer\.json cannot be read"),
    "tokenizer is none": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "is no tokenizer"),
    "tokenizer is a list": (lambda folder: (folder / "tokenizer.json").write_text("[]"), "is no JSON object"),
    "wrong tokenizer": (use_another_tokenizer, f"token ids up to {VOCABULARY}, but its model ends at {VOCABULARY - 1}"),
}


def test_the_folder_is_good_to_begin_with(folder):
    assert load(folder).vocabulary_size == VOCABULARY


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_with_its_reason(folder, case):
    harm, says = BROKEN[case]
    harm(folder)
    with pytest.raises(StartupFailed, match=says) as refusal:
        load(folder)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize("architecture", ["gemma2", "mamba", "bert"])
def test_gguf_files_of_other_architectures_are_refused(tmp_path, architecture):
    with pytest.raises(StartupFailed, match=f"architecture {architecture}.*use --engine llama_cpp"):
        load(TINY_MODELS[architecture](tmp_path / "model.gguf"))


def test_files_that_are_no_gguf_are_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(StartupFailed, match="not a GGUF file"):
        load(tmp_path / "model.gguf")
    with pytest.raises(StartupFailed, match="cannot be read"):
        load(tmp_path / "absent.gguf")


HIDDEN = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
from backend_service.engines.mlx_install import require_mlx
from service_kit.faults import StartupFailed
try:
    require_mlx()
except StartupFailed as refusal:
    print(refusal)
"""


def requiring(*hidden: str, search: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(search or "")}
    command = [sys.executable, "-c", HIDDEN, *hidden]
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=100
    ).stdout


@pytest.mark.parametrize("package", ["mlx", "mlx_lm", "tokenizers", "psutil"])
def test_what_is_not_installed_is_named_with_the_extra_that_brings_it(package):
    output = requiring(package)
    assert "The MLX engine is not fully installed" in output
    assert f"No module named '{package}" in output
    extra = "mlx" if sys.platform == "darwin" else "mlx-cpu"
    assert f'pip install "phaseroute[{extra}]"' in output


@pytest.mark.skipif(sys.platform != "linux", reason="only there it is a package of its own")
def test_mlx_without_its_computing_half_is_recognised(tmp_path):
    """`pip install mlx` alone brings no libmlx.so."""
    package = Path(mx.__file__).parent
    shutil.copytree(package, tmp_path / "mlx", ignore=shutil.ignore_patterns("lib", "include", "nn", "optimizers"))
    output = requiring(search=tmp_path)
    assert "Package mlx is installed without the part that computes (libmlx.so" in output
    assert 'pip install "phaseroute[mlx-cpu]", or "phaseroute[mlx-cuda]"' in output


def test_importing_mlx_leaves_the_limit_of_open_files_alone():
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 3000))\n"
        "from backend_service.engines.mlx_install import require_mlx; require_mlx()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout == "(1000, 3000)\n", done.stderr
