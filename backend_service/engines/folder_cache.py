"""Folders that take long to make, kept on disk: each is whole, or not there.

A folder is filled beside its place, synced, given a manifest, and renamed into place. One process at a time makes one;
others wait and find it. What a killed process left behind is removed by the next that makes something.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog

from backend_service.models import fingerprint
from service_kit.faults import StartupFailed

MANIFEST = "phaseroute.json"
_PART_PREFIX = ".part-"

_log = structlog.get_logger(__name__)


class FolderCache:
    """Named folders below one directory. Safe to use from any thread and from several processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, name: str) -> Path | None:
        """The folder, or None when it is not there or is not as it was made."""
        folder = self._directory / name
        return folder if damage(folder) == "" else None

    def make(
        self, name: str, fill: Callable[[Path], Mapping[str, Any]], *, waiting: Callable[[], None] = lambda: None
    ) -> Path:
        """The folder, filled by `fill` unless another process did so in the meantime. What `fill` returns becomes part
        of the manifest. `waiting` is called before a wait for another process.

        A damaged folder is replaced, with a warning. Raises `StartupFailed` when it cannot be written; then nothing is
        left behind."""
        folder = self._directory / name
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with self._lock(waiting):
                if found := self.get(name):
                    return found
                self._remove_leftovers()
                if folder.exists():
                    _log.warning(
                        "cached model is damaged", folder=str(folder), damage=damage(folder), action="made anew"
                    )
                    shutil.rmtree(folder)
                self._make(folder, fill)
        except OSError as error:
            raise StartupFailed(
                f"A model cannot be converted into {self._directory} ({error.strerror or error}); free some space "
                "there, set --converted-dir to another directory, or give --model an MLX folder."
            ) from error
        return folder

    def _make(self, folder: Path, fill: Callable[[Path], Mapping[str, Any]]) -> None:
        part = self._directory / f"{_PART_PREFIX}{folder.name}"
        part.mkdir()
        try:
            facts = fill(part)
            files = {path.name: [path.stat().st_size, fingerprint(path)] for path in sorted(part.iterdir())}
            for name in files:
                _sync(part / name)
            (part / MANIFEST).write_text(json.dumps({**facts, "files": files}, indent=1), "utf-8")
            _sync(part / MANIFEST)
            _sync(part)
            part.rename(folder)
            _sync(self._directory)
        finally:
            shutil.rmtree(part, ignore_errors=True)  # gone already when all went well

    def _remove_leftovers(self) -> None:
        for part in self._directory.glob(f"{_PART_PREFIX}*"):
            shutil.rmtree(part, ignore_errors=True)

    @contextmanager
    def _lock(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Held by whoever makes a folder; the kernel lets go of it when the process ends."""
        with (self._directory / ".lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def manifest(folder: Path) -> dict[str, Any]:
    """What is known of a folder of the cache; empty for other folders."""
    with suppress(OSError, ValueError):
        content = json.loads((folder / MANIFEST).read_bytes())
        if isinstance(content, dict):
            return content
    return {}


def damage(folder: Path) -> str:
    """In what the folder differs from its manifest, "" when in nothing. Large files are compared by samples."""
    files = manifest(folder).get("files")
    if not isinstance(files, dict):
        return "no manifest"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if fingerprint(path) != digest:
            return f"{name} has other contents"
    return ""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
