"""Small JSON documents that a service keeps over restarts: each is whole and its own, or as good as not there.

Nothing here stops a service. What cannot be read is ignored and what cannot be written is not kept, with one warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import structlog

PRIVATE = 0o600
"""For what tells of usage: nobody but the service's own user reads it."""
SHARED = 0o644
MOST_BYTES = 8 << 20
_PARTIAL = ".partial"
_ABANDONED_S = 3600.0
"""Nobody takes that long to write a small file: one that is older was left by a process that was killed."""

_log = structlog.get_logger(__name__)


def cache_directory() -> Path:
    """Where services keep what they can do without: $XDG_CACHE_HOME/phaseroute, ~/.cache/phaseroute by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "phaseroute"


@dataclass(frozen=True, slots=True)
class StateFormat:
    """What a file is to hold. Files of another kind or number are ignored."""

    kind: str
    """Such as "output lengths"; it names the file in warnings."""
    number: int
    """A change of what is written makes files with other numbers unfit."""
    otherwise: str
    """What happens while there is no usable file, such as "rates are measured anew"."""
    mode: int = PRIVATE
    most_bytes: int = MOST_BYTES


class Unfit(Exception):
    """A file is no use. Says why, without a word of the contents."""


class StateFile:
    """One document, a JSON object, on disk. One thread at a time; any number of processes, of which the last to write
    wins."""

    def __init__(self, path: Path, form: StateFormat) -> None:
        self.path = path
        self._form = form
        self._unwritable = False

    def read(self) -> dict[str, Any] | None:
        """What was written last, or None when there is nothing, or nothing usable, and then a warning says why. Never
        anything but what some `write` of this kind and number was given."""
        try:
            return load(self.path, self._form)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.reject(f"it cannot be read ({error.strerror or error})")
        except Unfit as error:
            self.reject(str(error))
        return None

    def reject(self, problem: str) -> None:
        """Warn that the file is not used. For callers whose document is whole and yet makes no sense to them.
        `problem` never quotes it."""
        _log.warning(
            "state file ignored",
            kind=self._form.kind,
            file=str(self.path),
            problem=problem,
            action=f"{self._form.otherwise}; the next save replaces the file",
        )

    def write(self, payload: Mapping[str, Any]) -> bool:
        """Replace the file, whole and synced or not at all. False when that failed; of several failures on end the
        first one is warned of. `payload` is what JSON knows: keys are strings, tuples come back as lists."""
        try:
            content = seal(payload, self._form)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self.path, content, self._form.mode)
        except OSError as error:
            return self._not_written(error.strerror or str(error))
        except ValueError:  # of JSON: a payload that only looked like it
            return self._not_written("it would hold what JSON cannot express, such as a number that is not finite")
        except Unfit as error:
            return self._not_written(str(error))
        self._unwritable = False
        return True

    def _not_written(self, problem: str) -> bool:
        if not self._unwritable:
            self._unwritable = True
            _log.warning(
                "state file not written",
                kind=self._form.kind,
                file=str(self.path),
                problem=problem,
                action=f"after a restart {self._form.otherwise}; make room, or let this user write there",
            )
        return False


def load(path: Path, form: StateFormat) -> dict[str, Any]:
    """What was sealed into the file. Raises `Unfit`, and OSError when it cannot be read."""
    return _unsealed(_content(path, form.most_bytes), form)


def seal(payload: Mapping[str, Any], form: StateFormat) -> bytes:
    """The contents of a file. Raises `Unfit` when they would be too large, and ValueError for what JSON cannot express.

    The payload goes in as it was summed: it is turned into text once, which takes most of the time."""
    text = _canonical(payload)
    head = json.dumps({"kind": form.kind, "format": form.number, "sha256": _checksum(text, form)})
    content = f'{head[:-1]}, "payload": {text}}}\n'.encode()
    if len(content) > form.most_bytes:
        raise Unfit(f"it would have {len(content)} bytes and may have {form.most_bytes}")
    return content


def _content(path: Path, most_bytes: int) -> bytes:
    # Not to wait for the other end of a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Unfit("it is not a regular file")
        if found.st_size > most_bytes:
            raise Unfit(f"it has {found.st_size} bytes and may have {most_bytes}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(descriptor)


def _unsealed(content: bytes, form: StateFormat) -> dict[str, Any]:
    try:
        document = json.loads(content.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Unfit("it is cut short or no JSON") from error
    if not isinstance(document, dict) or not isinstance(document.get("payload"), dict):
        raise Unfit("it is not a state file")
    kind, number = document.get("kind"), document.get("format")
    payload: dict[str, Any] = document["payload"]
    if kind != form.kind:
        raise Unfit(f"it is not a file of {form.kind}")
    if type(number) is not int or number != form.number:
        raise Unfit(f"it is not of format {form.number}, which is what this version reads")
    try:
        intact = document.get("sha256") == _checksum(_canonical(payload), form)
    except (ValueError, RecursionError):  # such as 1e999, which no file of ours has
        intact = False
    if not intact:
        raise Unfit("its checksum is wrong: it was changed or damaged")
    return payload


def _canonical(payload: Mapping[str, Any]) -> str:
    return json.dumps(payload, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(text: str, form: StateFormat) -> str:
    """Over kind and number too, so that no file passes for one of another kind."""
    return hashlib.sha256(f"{form.kind}\n{form.number}\n{text}".encode()).hexdigest()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Each writer has a file of its own until the rename: two at once leave one whole document, not a mix."""
    prefix = f".{path.name}."
    _remove_abandoned(path.parent, prefix)
    descriptor, partial = tempfile.mkstemp(_PARTIAL, prefix, path.parent)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    _sync(path.parent)


def _remove_abandoned(directory: Path, prefix: str) -> None:
    for partial in directory.iterdir():
        if partial.name.startswith(prefix) and partial.name.endswith(_PARTIAL):
            with suppress(OSError):  # another process removes it, or it is somebody else's
                if time.time() - partial.stat().st_mtime > _ABANDONED_S:
                    partial.unlink()


def _sync(directory: Path) -> None:
    """So that the new name outlives a power cut. Some file systems refuse it; the file is whole all the same."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
