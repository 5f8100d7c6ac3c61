"""Where no matrix library is ours to load. What happens where one is: tests/integration/test_mlx_blas.py."""

from __future__ import annotations

import ctypes
import sys

import pytest
from structlog.testing import capture_logs

from backend_service.engines import mlx_blas
from backend_service.engines.mlx_blas import prepare_blas


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def fail(*_arguments, **_options):
        raise AssertionError("loads a library")

    monkeypatch.setattr(ctypes, "CDLL", fail)


class Distribution:
    def __init__(self, name: str) -> None:
        self.metadata = {"Name": name}


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_mac_has_accelerate(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with capture_logs() as logs:
        blas = prepare_blas(4)
    assert (blas.name, blas.path, blas.fast, blas.remedy) == ("Accelerate", "", True, "")
    assert [(entry["log_level"], entry["name"]) for entry in logs] == [("info", "Accelerate")]


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_gpu_that_is_asked_for_has_its_own(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert prepare_blas(4, device="gpu").name == "the GPU's own"


@pytest.mark.parametrize(
    ("packages", "driver", "on_gpu"),
    [
        (["mlx", "mlx-cuda-13"], True, True),
        (["mlx", "mlx-cuda-13"], False, False),
        (["mlx", "mlx-cpu"], True, False),
    ],
)
def test_a_gpu_is_used_of_itself_when_mlx_and_the_driver_are_for_it(monkeypatch, packages, driver, on_gpu):
    def load(name: str | None, **_options: object) -> object:
        if name == "libcuda.so.1" and driver:
            return object()
        raise OSError(f"{name}: not found")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(mlx_blas, "distributions", lambda: [Distribution(name) for name in packages])
    monkeypatch.setattr(mlx_blas, "_bound_file", lambda: "")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    blas = prepare_blas(4)
    assert (blas.name == "the GPU's own") == on_gpu
    assert bool(blas.remedy) != on_gpu, "a CPU without OpenBLAS is slow, and says what to do"
