"""The peer's own virtual environment: made once, then reused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.side_by_side.faults import SetUpFailed

PEER = "xllamacpp"
PEER_VERSION = "2026.10.11549"
"""Exact: its server is what the figures are about."""
FOLDER = Path(__file__).parents[2] / ".venv-peer"


def peer_python(folder: Path = FOLDER) -> Path:
    """The interpreter of an environment that has the peer in this version. Raises `SetUpFailed`."""
    python = folder / "bin" / "python"
    if _installed(python) == PEER_VERSION:
        return python
    wanted = f"{PEER}=={PEER_VERSION}"
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        # Only a wheel: compiling it would need what this project does not.
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", wanted],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SetUpFailed(
                f"The peer ({wanted}) could not be installed: "
                f"{' '.join(command)} ended with code {result.returncode}:\n{result.stderr.strip()}\n"
                f"Check the network and that PyPI has a wheel of it for this platform and Python "
                f"{sys.version_info.major}.{sys.version_info.minor}; then run this again."
            )
    return python


def _installed(python: Path) -> str | None:
    """The version that this interpreter finds; None without the one or the other."""
    question = f"from importlib.metadata import version; print(version({PEER!r}))"
    try:
        result = subprocess.run([str(python), "-c", question], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None
