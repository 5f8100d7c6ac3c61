"""Which matrix library MLX is bound to. Each case is a process of its own: what is loaded stays loaded."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.mlx_kit import need_mlx

need_mlx()
ROOT = Path(__file__).parents[2]
OPENBLAS = "libopenblas.so.0"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a Mac has Accelerate")
MULTIPLY = "\nimport mlx.core as mx; a = mx.ones((64, 64)); mx.eval(mx.matmul(a, a, stream=mx.cpu))"
PREPARE = "from backend_service.engines.mlx_blas import prepare_blas; print(prepare_blas(2{options}))"


def need_openblas() -> None:
    try:
        ctypes.CDLL(OPENBLAS)
    except OSError:
        pytest.skip("OpenBLAS is not installed: apt-get install libopenblas0-pthread")


def run(script: str, **environment: str) -> tuple[str, str]:
    """Standard output, and the file that MLX's matrix product was found in, by the dynamic linker's own account."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "LD_DEBUG": "bindings", "LD_BIND_NOW": "", **environment},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    bound = [
        line.split(" to ")[1].split()[0]
        for line in done.stderr.splitlines()
        if "libmlx.so" in line.split(" to ")[0] and "`cblas_sgemm'" in line
    ]
    assert bound, "MLX multiplied nothing"
    return done.stdout, bound[-1]


def test_mlx_multiplies_with_openblas_once_it_is_prepared():
    need_openblas()
    output, bound = run(PREPARE.format(options="") + MULTIPLY)
    assert "openblas" in bound
    assert f"Blas(name='OpenBLAS', path='{bound}', fast=True, remedy='')" in output
    assert "warning" not in output


def test_without_it_mlx_multiplies_with_its_own():
    """Else the test above could not fail."""
    _, bound = run(MULTIPLY)
    assert "openblas" not in bound


def test_the_slow_one_can_be_asked_for():
    output, bound = run(PREPARE.format(options=", library='reference'") + MULTIPLY)
    assert "openblas" not in bound
    assert "Blas(name='reference BLAS', path='', fast=False, remedy='')" in output


def test_one_that_is_preloaded_is_kept():
    need_openblas()
    output, bound = run(PREPARE.format(options=", library='libabsent.so'") + MULTIPLY, LD_PRELOAD=OPENBLAS)
    assert "openblas" in bound
    assert "Blas(name='OpenBLAS'" in output


def test_preparing_again_changes_nothing_but_the_threads():
    need_openblas()
    again = MULTIPLY + "\nprint(prepare_blas(1))\nimport ctypes; print(ctypes.CDLL(None).openblas_get_num_threads())"
    output, bound = run(PREPARE.format(options="") + again)
    first, second, threads = (line for line in output.splitlines() if line[0] != "2")
    assert first == second
    assert threads == "1"
    assert "openblas" in bound


def test_too_late_is_said():
    output, bound = run(MULTIPLY + "\n" + PREPARE.format(options=""))
    assert "openblas" not in bound
    assert "warning" in output
    assert "it is too late now" in output


def test_what_is_not_installed_is_warned_about_with_a_remedy():
    hidden = "import ctypes, backend_service.engines.mlx_blas as b; b._OPENBLAS = 'libabsent.so.0'\n"
    output, bound = run(hidden + PREPARE.format(options="") + MULTIPLY)
    assert "openblas" not in bound
    assert "warning" in output
    assert "apt-get install libopenblas0-pthread" in output


def test_a_library_that_was_named_must_be_there():
    script = (
        "from service_kit.faults import StartupFailed\ntry:\n    "
        + PREPARE.format(options=", library='libabsent.so'")
        + "\nexcept StartupFailed as refusal:\n    print(refusal)"
        + MULTIPLY
    )
    assert "BLAS library libabsent.so cannot be loaded" in run(script)[0]


def test_a_gpu_needs_none():
    output, bound = run(PREPARE.format(options=", device='gpu'") + MULTIPLY)
    assert "openblas" not in bound
    assert "Blas(name=\"the GPU's own\", path='', fast=True, remedy='')" in output
