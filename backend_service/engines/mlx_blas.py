"""The matrix library that MLX computes with on a Linux CPU.

Its wheels bring the Netlib reference BLAS, which takes ten to a hundred times as long as OpenBLAS. The dynamic linker
binds MLX to whichever is there first, so OpenBLAS has to be loaded before MLX. A Mac has Accelerate, a GPU its own.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path

import structlog

from service_kit.faults import StartupFailed

REFERENCE = "reference"
"""For `library`: leave MLX with the one that it brings."""
_OPENBLAS = "libopenblas.so.0"
_SYMBOL = "cblas_sgemm"
_CUDA_DRIVER = "libcuda.so.1"
_REMEDY = "apt-get install libopenblas0-pthread, or your system's package of OpenBLAS"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Blas:
    """What multiplies matrices."""

    name: str
    """For people, such as "OpenBLAS"."""
    path: str
    """Its file; empty when it is not ours to load."""
    fast: bool
    remedy: str
    """What to do about a slow one; empty otherwise."""


class _Symbol(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def prepare_blas(threads: int, *, device: str = "auto", library: str = "") -> Blas:
    """Load OpenBLAS for MLX and have it use this many threads. To be called before MLX is imported for the first time;
    again, it does no harm.

    `device`: where MLX is to compute, as in `MlxModel`; on a GPU, and on a Mac, nothing is loaded. `library`: another
    BLAS with the same interface, or `REFERENCE`. One that is there already (LD_PRELOAD) is kept. Logs what is used, as
    a warning with a remedy when it is slow. Raises `StartupFailed` when `library` cannot be loaded."""
    blas = _prepare(threads, device, library)
    if blas.remedy:
        _log.warning("matrix library is slow", name=blas.name, remedy=blas.remedy)
    else:
        _log.info("matrix library", name=blas.name, path=blas.path, threads=threads)
    return blas


def _prepare(threads: int, device: str, library: str) -> Blas:
    if sys.platform == "darwin":
        return Blas("Accelerate", "", fast=True, remedy="")
    if device == "gpu" or (device == "auto" and _has_cuda()):
        return Blas("the GPU's own", "", fast=True, remedy="")
    reference = Blas("reference BLAS", "", fast=False, remedy="")
    if library == REFERENCE:
        return reference
    path = _bound_file()
    if not path:
        if "mlx.core" in sys.modules:
            return replace(
                reference, remedy="load OpenBLAS before MLX is imported: it is too late now, start the process anew"
            )
        try:
            ctypes.CDLL(library or _OPENBLAS, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            if library:
                raise StartupFailed(f"BLAS library {library} cannot be loaded ({error}); {_REMEDY}.") from error
            return replace(reference, remedy=_REMEDY)
        path = _bound_file()
    return _in_use(path, threads)


def _in_use(path: str, threads: int) -> Blas:
    try:
        ctypes.CDLL(None).openblas_set_num_threads(ctypes.c_int(threads))
    except AttributeError:  # not OpenBLAS: it heeds its own environment variables
        return Blas(Path(path).name, path, fast=True, remedy="")
    return Blas("OpenBLAS", path, fast=True, remedy="")


def _bound_file() -> str:
    """Where a library that is loaded from now on finds its matrix product; empty: in what it brings itself."""
    process = ctypes.CDLL(None)
    try:
        function = getattr(process, _SYMBOL)
    except AttributeError:
        return ""
    symbol = _Symbol()
    found = process.dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(symbol))
    return symbol.file.decode("utf-8", "replace") if found and symbol.file else ""


def _has_cuda() -> bool:
    """Whether MLX is here in its CUDA form, and the driver too."""
    if not any((name := part.metadata["Name"]) and name.lower().startswith("mlx-cuda") for part in distributions()):
        return False
    try:
        ctypes.CDLL(_CUDA_DRIVER)
    except OSError:
        return False
    return True
