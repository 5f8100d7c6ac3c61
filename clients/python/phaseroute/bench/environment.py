"""On what a benchmark ran: machine and versions, as far as this process can tell."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

PACKAGES = ("phaseroute", "grpcio", "protobuf", "llama-cpp-python", "mlx", "mlx-lm", "numpy", "matplotlib")


def machine() -> Mapping[str, str]:
    """Of the client: backends may run elsewhere."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": f"{_processor()}, {usable} of {os.cpu_count()} cores usable",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def versions() -> Mapping[str, str]:
    """Installed packages that make a difference."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    """Linux says more in /proc/cpuinfo than to `platform`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "processor unknown")
