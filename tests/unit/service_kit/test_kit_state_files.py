"""Documents that are whole and their own, or as good as not there."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from service_kit import state_files
from service_kit.state_files import SHARED, StateFile, StateFormat

ROOT = Path(__file__).parents[3]
FORM = StateFormat("counts", 2, "counting starts at nothing")
DOCUMENT = {"counts": [3, 1, 2], "of": {"ä": 0.1, "\ud800": None}, "on": True}


def file_in(directory: Path, form: StateFormat = FORM) -> StateFile:
    return StateFile(directory / "counts.json", form)


@pytest.fixture
def saved(tmp_path) -> Path:
    file = file_in(tmp_path)
    assert file.write(DOCUMENT)
    return file.path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_was_written_comes_back(tmp_path, saved):
    with capture_logs() as logs:
        assert file_in(tmp_path).read() == DOCUMENT
    assert logs == []
    assert names(tmp_path) == ["counts.json"]


def test_folders_are_made_on_the_way(tmp_path):
    file = StateFile(tmp_path / "deep" / "er" / "counts.json", FORM)
    assert file.write(DOCUMENT)
    assert file.read() == DOCUMENT


def test_a_file_that_was_never_written_is_no_cause_for_a_warning(tmp_path):
    with capture_logs() as logs:
        assert file_in(tmp_path / "never").read() is None
    assert logs == []


@pytest.mark.parametrize(("form", "mode"), [(FORM, 0o600), (StateFormat("rates", 1, "", mode=SHARED), 0o644)])
def test_others_may_read_it_only_where_that_is_meant(tmp_path, form, mode):
    file = file_in(tmp_path, form)
    before = os.umask(0)
    try:
        file.write(DOCUMENT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.path.stat().st_mode) == mode


# Damage


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


def nested(path: Path) -> None:
    path.write_text('{"payload":' * 100_000)


def another_value(path: Path) -> None:
    path.write_text(path.read_text().replace("[3,1,2]", "[3,1,7]"))


def no_checksum(path: Path) -> None:
    document = json.loads(path.read_text())
    del document["sha256"]
    path.write_text(json.dumps(document))


def endless_number(path: Path) -> None:
    path.write_text('{"kind": "counts", "format": 2, "payload": {"a": 1e999}}')


def a_bare_document(path: Path) -> None:
    path.write_text(json.dumps(DOCUMENT))


def a_list(path: Path) -> None:
    path.write_text("[1]")


def an_older_format(path: Path) -> None:
    StateFile(path, StateFormat(FORM.kind, 1, "")).write(DOCUMENT)


def a_true_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 2', '"format": true'))


def another_kind(path: Path) -> None:
    StateFile(path, StateFormat("rates", FORM.number, "")).write(DOCUMENT)


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def huge(path: Path) -> None:
    os.truncate(path, FORM.most_bytes + 1)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (cut, "it is cut short or no JSON"),
        (empty, "it is cut short or no JSON"),
        (binary, "it is cut short or no JSON"),
        (nested, "it is cut short or no JSON"),
        (another_value, "its checksum is wrong: it was changed or damaged"),
        (no_checksum, "its checksum is wrong: it was changed or damaged"),
        (endless_number, "its checksum is wrong: it was changed or damaged"),
        (a_bare_document, "it is not a state file"),
        (a_list, "it is not a state file"),
        (an_older_format, "it is not of format 2, which is what this version reads"),
        (a_true_format, "it is not of format 2, which is what this version reads"),
        (another_kind, "it is not a file of counts"),
        (a_directory, "it is not a regular file"),
        (a_pipe, "it is not a regular file"),
        (a_loop, "it cannot be read (Too many levels of symbolic links)"),
        (huge, "it has 8388609 bytes and may have 8388608"),
    ],
)
def test_a_file_that_is_no_use_is_ignored_with_one_warning(tmp_path, saved, harm, says):
    harm(saved)
    with capture_logs() as logs:
        assert file_in(tmp_path).read() is None
    assert logs == [
        {
            "event": "state file ignored",
            "log_level": "warning",
            "kind": "counts",
            "file": str(saved),
            "problem": says,
            "action": "counting starts at nothing; the next save replaces the file",
        }
    ]


@pytest.mark.parametrize("harm", [cut, a_pipe, a_loop, another_kind])
def test_the_next_save_replaces_it(tmp_path, saved, harm):
    harm(saved)
    assert file_in(tmp_path).write(DOCUMENT)
    assert file_in(tmp_path).read() == DOCUMENT


def test_a_file_that_may_not_be_read_is_ignored(tmp_path, saved, monkeypatch):
    def refuses(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(state_files.os, "open", refuses)  # root may read everything
    with capture_logs() as logs:
        assert file_in(tmp_path).read() is None
    assert [entry["problem"] for entry in logs] == ["it cannot be read (Permission denied)"]


def test_no_word_of_the_contents_is_logged(tmp_path, saved):
    saved.write_text('{"kind": "secret", "payload": {"secret": "secret"}, "format": "secret"}')
    with capture_logs() as logs:
        file_in(tmp_path).read()
    assert "secret" not in str(logs)


# Failing writes


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_warned_of_once_and_leaves_the_last_document(tmp_path, saved, monkeypatch):
    file = file_in(tmp_path)
    with capture_logs() as logs, monkeypatch.context() as patch:
        patch.setattr(state_files.os, "fsync", full_disk)
        assert [file.write({}) for _ in range(3)] == [False] * 3
    assert [(entry["log_level"], entry["problem"]) for entry in logs] == [("warning", "No space left on device")]
    assert logs[0]["action"].startswith("after a restart counting starts at nothing; make room")
    assert names(tmp_path) == ["counts.json"]
    assert file.read() == DOCUMENT


def test_a_failure_after_a_success_is_news(tmp_path, monkeypatch):
    file = file_in(tmp_path)
    for _ in range(2):
        with capture_logs() as logs, monkeypatch.context() as patch:
            patch.setattr(state_files.os, "fsync", full_disk)
            assert not file.write(DOCUMENT)
        assert len(logs) == 1
        assert file.write(DOCUMENT)


def test_a_place_that_cannot_be_written_is_warned_of(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "counts.json").mkdir()
    with capture_logs() as logs:
        assert not file_in(tmp_path / "file").write(DOCUMENT)
        assert not file_in(tmp_path).write(DOCUMENT)
    assert [entry["event"] for entry in logs] == ["state file not written"] * 2
    assert names(tmp_path) == ["counts.json", "file"]


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ({"rate": float("nan")}, "what JSON cannot express"),
        ({"rate": float("inf")}, "what JSON cannot express"),
        ({"text": "x" * FORM.most_bytes}, "and may have 8388608"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path, saved, payload, says):
    with capture_logs() as logs:
        assert not file_in(tmp_path).write(payload)
    assert says in logs[0]["problem"]
    assert file_in(tmp_path).read() == DOCUMENT


def test_a_system_that_syncs_no_folders_is_good_enough(tmp_path, monkeypatch):
    whole = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        whole(descriptor)

    monkeypatch.setattr(state_files.os, "fsync", files_only)
    assert file_in(tmp_path).write(DOCUMENT)
    assert file_in(tmp_path).read() == DOCUMENT


# Several at once, and some that are killed


def test_of_two_that_write_at_once_one_wins(tmp_path):
    documents = [{"by": index, "filling": [index] * 5000} for index in range(2)]
    at_once = threading.Barrier(3)
    seen = []

    def write(document: dict[str, object]) -> None:
        file = file_in(tmp_path)
        at_once.wait(10)
        for _ in range(30):
            assert file.write(document)

    writers = [threading.Thread(target=write, args=(document,)) for document in documents]
    for writer in writers:
        writer.start()
    with capture_logs() as logs:
        at_once.wait(10)
        while any(writer.is_alive() for writer in writers):
            seen.append(file_in(tmp_path).read())
    for writer in writers:
        writer.join(10)
    assert file_in(tmp_path).read() in documents
    assert all(document is None or document in documents for document in seen)
    assert logs == []
    assert names(tmp_path) == ["counts.json"]


KILLED = """
import os, signal, sys
from pathlib import Path
from service_kit.state_files import StateFile, StateFormat

os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
StateFile(Path(sys.argv[1]), StateFormat("counts", 2, "")).write({})
"""


def test_a_process_that_is_killed_while_it_writes_changes_nothing_and_is_cleaned_up_after(tmp_path, saved):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(saved)], cwd=ROOT, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (partial,) = [path for path in tmp_path.iterdir() if path != saved]
    assert file_in(tmp_path).read() == DOCUMENT

    file_in(tmp_path).write(DOCUMENT)
    assert partial.exists(), "another process may be writing it"
    os.utime(partial, (0, 0))
    file_in(tmp_path).write(DOCUMENT)
    assert names(tmp_path) == ["counts.json"]


# Whatever may be there instead


texts = st.text(max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = scalars | st.lists(scalars, max_size=4) | st.dictionaries(texts, scalars, max_size=3)
documents = st.dictionaries(texts, values, max_size=3)


def said(document: object) -> str:
    """1, 1.0 and True are three things, which Python's own comparison takes for one."""
    return json.dumps(document, sort_keys=True)


def read_back(content: bytes) -> object:
    with tempfile.TemporaryDirectory() as directory, capture_logs() as logs:
        file = file_in(Path(directory))
        file.path.write_bytes(content)
        found = file.read()
        assert [entry["event"] for entry in logs] == ([] if found is not None else ["state file ignored"])
        return found


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_raise_or_pass_for_a_document(content):
    assert read_back(content) is None


def written(document: dict[str, object]) -> bytes:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # these files live for less than a second
        file = file_in(Path(directory))
        assert file.write(document)
        return file.path.read_bytes()


@settings(max_examples=100, deadline=None)
@given(documents)
def test_any_document_comes_back(document):
    assert said(read_back(written(document))) == said(document)


@settings(max_examples=100, deadline=None)
@given(documents, st.data())
def test_a_file_cut_short_is_never_used(document, data):
    content = written(document)
    kept = data.draw(st.integers(0, len(content) - 2))  # the last byte is the end of the line
    assert read_back(content[:kept]) is None


@settings(max_examples=100, deadline=None)
@given(documents, st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=3))
def test_flipped_bits_never_change_what_is_read(document, flips):
    content = bytearray(written(document))
    for place, bit in flips:
        content[place % len(content)] ^= 1 << bit
    found = read_back(bytes(content))
    # The case of an escape may change without changing what is said.
    assert found is None or said(found) == said(document)


@settings(max_examples=100, deadline=None)
@given(documents)
def test_a_payload_under_the_checksum_of_another_is_never_used(other):
    document = json.loads(written(DOCUMENT))
    document["payload"] = other
    found = read_back(json.dumps(document).encode())
    assert found is None or other == DOCUMENT
