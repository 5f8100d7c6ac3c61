"""Files that are read again when they change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from service_kit.faults import StartupFailed

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")
_Stamp = tuple[int, int, int] | None


class Watched(Generic[_T]):
    """What a loader makes of some files, as they are now.

    What cannot be loaded, such as a file half written, is logged once and changes nothing: the last good value stays.
    Any thread.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], _T]) -> None:
        """`load` reads the files. Raises its `StartupFailed`."""
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        self._stamps = self._look()
        self._value = load()

    def get(self) -> _T:
        """The newest good value; the same object until the files change. A few microseconds a file."""
        with self._lock:
            # Looked at before they are read: what changes meanwhile is read the next time.
            stamps = self._look()
            if stamps != self._stamps:
                self._stamps = stamps
                self._reload()
            return self._value

    def _reload(self) -> None:
        files = [str(path) for path in self._paths]
        try:
            self._value = self._load()
        except StartupFailed as failure:
            _log.warning("changed files cannot be used; what they held before stays", files=files, problem=str(failure))
        else:
            _log.info("changed files are in use", files=files)

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def read_file(path: Path, what: str) -> bytes:
    """A file's content. Raises `StartupFailed` naming `what` it was to be."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupFailed(
            f"The {what} {path} cannot be read: {error.strerror}; correct the path, or let this user read it."
        ) from error


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    # The inode as well: orchestrators swap a link, and the new file may be older.
    return found.st_mtime_ns, found.st_size, found.st_ino
