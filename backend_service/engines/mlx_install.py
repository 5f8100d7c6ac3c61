"""Whether MLX is installed, and as what. Nothing here imports it before it is asked to."""

from __future__ import annotations

import importlib
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from service_kit.faults import StartupFailed


def require_mlx() -> None:
    """Import MLX and mlx-lm (seconds: transformers comes along), or raise `StartupFailed` with what to install. To be
    called after `prepare_blas`, and before any module that imports MLX at its top."""
    try:
        importlib.import_module("mlx.core")
        with _limits_kept():
            importlib.import_module("mlx_lm.utils")
        for name in ("tokenizers", "psutil"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise StartupFailed(f"The MLX engine is not fully installed ({error}): {_remedy()}.") from error
    except ImportError as error:
        if "libmlx" in str(error):
            raise StartupFailed(
                f"Package mlx is installed without the part that computes ({error}): {_remedy()}."
            ) from error
        raise StartupFailed(f"MLX cannot be loaded on this machine ({error}): {_remedy()}.") from error


def _remedy() -> str:
    if sys.platform == "darwin":
        return 'pip install "phaseroute[mlx]"'
    return 'pip install "phaseroute[mlx-cpu]", or "phaseroute[mlx-cuda]" for an NVIDIA GPU'


@contextmanager
def _limits_kept() -> Iterator[None]:
    """mlx_lm lowers the limit of open files to 2048 when imported, the hard one for good, and fails where that would
    raise it. A server's limits are not its business."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit
