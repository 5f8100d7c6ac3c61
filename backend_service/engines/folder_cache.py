"""Folders that take long to make, kept on disk: each is whole, or not there.

A folder is filled beside its place, synced, given a manifest with the checksums of its files, and renamed into place.
One process at a time makes one; others wait and find it. What a killed process left behind is removed by the next that
makes something.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from service_kit.faults import StartupFailed
from service_kit.state_files import SHARED, StateFormat, Unfit, load, seal

MANIFEST = "phaseroute.json"
CHEAP_BYTES = 512 << 20
"""Files up to this size are compared by checksum whenever a folder is used: about a second, where to load them takes
several."""
_FORM = StateFormat("converted models", 1, "the model is converted anew", mode=SHARED)
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
                problem = damage(folder)
                if not problem:
                    return folder
                self._remove_leftovers()
                if folder.exists():
                    _log.warning("cached model is damaged", folder=str(folder), damage=problem, action=_FORM.otherwise)
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
            files = {path.name: _Record.of(path).as_json() for path in sorted(part.iterdir())}
            for name in files:
                _sync(part / name)
            (part / MANIFEST).write_bytes(seal({**facts, "files": files}, _FORM))
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


@dataclass(frozen=True, slots=True)
class _Record:
    """What a manifest says of a file."""

    size_bytes: int
    written_s: int
    """Unix time of the last change; in whole seconds, as archives and images keep it."""
    sha256: str

    @classmethod
    def of(cls, path: Path) -> _Record:
        found = path.stat()
        return cls(found.st_size, int(found.st_mtime), _checksum(path))

    def as_json(self) -> list[int | str]:
        return [self.size_bytes, self.written_s, self.sha256]

    def damage(self, path: Path, *, thorough: bool) -> str:
        """How the file differs, "" where it does not. Read is a small one, one that was touched, and any if wished."""
        try:
            found = path.stat()
        except OSError as error:
            return (
                f"{path.name} is missing" if isinstance(error, FileNotFoundError) else f"{path.name}: {error.strerror}"
            )
        if not stat.S_ISREG(found.st_mode):
            return f"{path.name} is not a regular file"
        if found.st_size != self.size_bytes:
            return f"{path.name} has {found.st_size} bytes instead of {self.size_bytes}"
        if not thorough and found.st_size > CHEAP_BYTES and int(found.st_mtime) == self.written_s:
            return ""
        try:
            return "" if _checksum(path) == self.sha256 else f"{path.name} has other contents"
        except OSError as error:
            return f"{path.name} cannot be read ({error.strerror})"


def manifest(folder: Path) -> dict[str, Any]:
    """What is known of a folder of the cache; empty for other folders, and where the manifest is damaged."""
    try:
        return load(folder / MANIFEST, _FORM)
    except (OSError, Unfit):
        return {}


def damage(folder: Path, *, thorough: bool = False) -> str:
    """In what the folder differs from its manifest, "" when in nothing. Files of more than `CHEAP_BYTES` are read only
    where their size is right and their time is not, or all of them if `thorough`."""
    try:
        files = load(folder / MANIFEST, _FORM)["files"]
    except FileNotFoundError:
        return "no manifest"
    except OSError as error:
        return f"its manifest cannot be read ({error.strerror})"
    except Unfit as error:
        return f"its manifest is no use: {error}"
    problems = (_Record(*record).damage(folder / name, thorough=thorough) for name, record in files.items())
    return next(filter(None, problems), "")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
