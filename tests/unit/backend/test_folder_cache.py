"""Folders that are whole or not there."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from backend_service.engines import folder_cache
from backend_service.engines.folder_cache import MANIFEST, FolderCache, damage, manifest
from service_kit.faults import StartupFailed


def fill(folder: Path) -> dict[str, str]:
    (folder / "weights").write_bytes(bytes(1000))
    (folder / "config").write_text("{}")
    return {"source": "model.gguf"}


def never(folder: Path) -> dict[str, str]:
    raise AssertionError("is there already")


@pytest.fixture
def made(tmp_path) -> Path:
    return FolderCache(tmp_path).make("model", fill)


def left_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".lock"}


def test_a_folder_is_made_once(tmp_path, made):
    assert made == tmp_path / "model"
    assert FolderCache(tmp_path).get("model") == made
    assert FolderCache(tmp_path).make("model", never) == made
    assert manifest(made)["source"] == "model.gguf"
    assert damage(made) == ""
    assert left_in(tmp_path) == {"model"}


def test_one_that_was_never_made_is_not_there(tmp_path):
    assert FolderCache(tmp_path / "absent").get("model") is None
    assert manifest(tmp_path) == {}


def shorten(folder: Path) -> None:
    os.truncate(folder / "weights", 999)


def alter(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(999) + b"x")


def lose(folder: Path) -> None:
    (folder / "config").unlink()


def forget(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def garble(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 20)


def flip(path: Path, place: int = 0) -> None:
    """One bit, as a bad disk does it: sizes and times stay."""
    found = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def flip_a_setting(folder: Path) -> None:
    flip(folder / "config", 1)


def flip_a_fact(folder: Path) -> None:
    flip(folder / MANIFEST, (folder / MANIFEST).read_text().index("model.gguf"))


def turn_into_a_folder(folder: Path) -> None:
    lose(folder)
    (folder / "config").mkdir()


def take_one_of_an_earlier_version(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({"source": "model.gguf", "files": {"config": [2, "44136fa355b3678a"]}}))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (shorten, "weights has 999 bytes instead of 1000"),
        (alter, "weights has other contents"),
        (lose, "config is missing"),
        (forget, "no manifest"),
        (garble, "its manifest is no use: it is cut short or no JSON"),
        (flip_a_setting, "config has other contents"),
        (flip_a_fact, "its manifest is no use: its checksum is wrong: it was changed or damaged"),
        (turn_into_a_folder, "config is not a regular file"),
        (take_one_of_an_earlier_version, "its manifest is no use: it is not a state file"),
    ],
)
def test_a_damaged_one_is_discarded_and_made_anew_with_a_warning(tmp_path, made, harm, says):
    harm(made)
    (made / "extra").write_text("stale")
    assert FolderCache(tmp_path).get("model") is None
    with capture_logs() as logs:
        assert FolderCache(tmp_path).make("model", fill) == made
    assert [(entry["log_level"], entry["damage"], entry["action"]) for entry in logs] == [
        ("warning", says, "the model is converted anew")
    ]
    assert (damage(made, thorough=True), (made / "extra").exists()) == ("", False)


@pytest.fixture
def large(monkeypatch) -> None:
    """As if all files were too large to read them at every start."""
    monkeypatch.setattr(folder_cache, "CHEAP_BYTES", 0)


def touch(path: Path) -> None:
    os.utime(path, (1, 1))


@pytest.mark.usefixtures("large")
def test_of_a_large_file_size_and_time_are_enough(made, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(folder_cache, "_checksum", lambda path: pytest.fail(f"{path} was read"))
        assert damage(made) == ""
    flip(made / "weights", 500)
    assert damage(made) == ""
    assert damage(made, thorough=True) == "weights has other contents"


@pytest.mark.usefixtures("large")
def test_a_large_file_that_was_touched_is_read(made):
    touch(made / "weights")
    assert damage(made) == "", "only copied, say"
    flip(made / "weights", 500)
    assert damage(made) == "weights has other contents"


@pytest.mark.usefixtures("large")
def test_archives_keep_whole_seconds(made):
    os.utime(made / "weights", (int((made / "weights").stat().st_mtime),) * 2)
    flip(made / "weights")
    assert damage(made) == ""


@pytest.mark.usefixtures("large")
def test_a_large_file_cut_short_is_always_noticed(made):
    shorten(made)
    assert damage(made) == "weights has 999 bytes instead of 1000"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_to_a_manifest_is_taken_for_another_manifest(data):
    with tempfile.TemporaryDirectory() as directory, capture_logs():
        folder = FolderCache(Path(directory)).make("model", fill)
        whole, content = manifest(folder), bytearray((folder / MANIFEST).read_bytes())
        for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
            content[place] = data.draw(st.integers(0, 255))
        del content[data.draw(st.integers(0, len(content))) :]
        (folder / MANIFEST).write_bytes(content)
        assert manifest(folder) in ({}, whole)
        assert (damage(folder) == "") == (manifest(folder) == whole)


def test_a_full_disk_leaves_nothing_behind_and_says_what_to_do(tmp_path):
    def too_much(folder: Path) -> dict[str, str]:
        fill(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StartupFailed, match=r"\(No space left on device\); free some space there, set --converted-dir"):
        FolderCache(tmp_path).make("model", too_much)
    assert left_in(tmp_path) == set()
    assert FolderCache(tmp_path).make("model", fill)


def test_a_fault_while_filling_leaves_nothing_behind(tmp_path):
    def fails(folder: Path) -> dict[str, str]:
        fill(folder)
        raise StartupFailed("odd model")

    with pytest.raises(StartupFailed, match="odd model"):
        FolderCache(tmp_path).make("model", fails)
    assert left_in(tmp_path) == set()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupFailed, match="cannot be converted into"):
        FolderCache(tmp_path / "file").make("model", fill)


def test_two_at_once_make_one(tmp_path):
    filling, waiting = threading.Event(), threading.Event()
    made: list[Path] = []

    def slowly(folder: Path) -> dict[str, str]:
        filling.set()
        assert waiting.wait(10)
        return fill(folder)

    first = threading.Thread(target=lambda: made.append(FolderCache(tmp_path).make("model", slowly)))
    first.start()
    assert filling.wait(10)
    assert FolderCache(tmp_path).get("model") is None, "half of one is not there"
    made.append(FolderCache(tmp_path).make("model", never, waiting=waiting.set))
    first.join(10)
    assert made == [tmp_path / "model"] * 2
    assert left_in(tmp_path) == {"model"}


KILLED = """
import os, signal, sys
from pathlib import Path
from backend_service.engines.folder_cache import FolderCache

def fill(folder):
    (folder / "weights").write_bytes(bytes(10))
    os.kill(os.getpid(), signal.SIGKILL)

FolderCache(Path(sys.argv[1])).make("model", fill)
"""


def test_what_a_killed_process_began_is_never_used_and_goes_away(tmp_path):
    root = Path(__file__).parents[3]
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert left_in(tmp_path) != set(), "nothing was begun"
    assert FolderCache(tmp_path).get("model") is None
    FolderCache(tmp_path).make("other", fill)
    assert left_in(tmp_path) == {"other"}
