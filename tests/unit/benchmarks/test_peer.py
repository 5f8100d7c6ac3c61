import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.engine_vs_llama_server import plan_of
from benchmarks.side_by_side import peer_environment
from benchmarks.side_by_side.answer import Chunk, Usage
from benchmarks.side_by_side.faults import SetUpFailed
from benchmarks.side_by_side.llama_server import chunk_of
from benchmarks.side_by_side.peer_environment import PEER_VERSION, peer_python


def test_a_streamed_token_is_a_chunk() -> None:
    event = {"index": 0, "content": "ge", "tokens": [361], "stop": False, "tokens_evaluated": 40}
    assert chunk_of(event) == Chunk((361,))


def test_the_last_event_has_the_usage_and_the_prompt_is_what_was_reused_and_what_was_computed() -> None:
    event = {"content": "", "tokens": [], "stop": True, "timings": {"cache_n": 496, "prompt_n": 20, "predicted_n": 128}}
    assert chunk_of(event) == Chunk(usage=Usage(prompt_tokens=516, cached_tokens=496, generated_tokens=128))


@pytest.mark.parametrize("event", [{"error": {"message": "context is full"}}, {"content": "no tokens"}])
def test_anything_else_is_an_error_that_shows_it(event: dict[str, object]) -> None:
    with pytest.raises(RuntimeError) as failure:
        chunk_of(event)
    assert all(str(value) in str(failure.value) for value in event.values())


class Commands:
    """Stands for subprocess.run: notes what is run; the environment holds `version` until something is installed."""

    def __init__(self, version: str | None, *, install_code: int = 0) -> None:
        self.ran: list[list[str]] = []
        self._version = version
        self._install_code = install_code

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "-c" in command:
            if self._version is None:
                raise FileNotFoundError(command[0])
            return subprocess.CompletedProcess(command, 0, f"{self._version}\n", "")
        self.ran.append(command)
        code = self._install_code if "pip" in command else 0
        return subprocess.CompletedProcess(command, code, "", "no matching distribution")


def test_an_environment_with_the_pinned_peer_is_reused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = Commands(PEER_VERSION)
    monkeypatch.setattr(peer_environment.subprocess, "run", commands)
    assert peer_python(tmp_path) == tmp_path / "bin" / "python"
    assert commands.ran == []


@pytest.mark.parametrize("there", [None, "2025.1.1"])
def test_without_it_or_with_another_version_it_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str | None
) -> None:
    commands = Commands(there)
    monkeypatch.setattr(peer_environment.subprocess, "run", commands)
    peer_python(tmp_path)
    make, install = commands.ran
    assert make[-2:] == ["--clear", str(tmp_path)]
    assert install[0] == str(tmp_path / "bin" / "python")
    assert install[-1] == f"xllamacpp=={PEER_VERSION}"


def test_a_failed_install_says_what_failed_and_what_to_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_environment.subprocess, "run", Commands(None, install_code=1))
    with pytest.raises(SetUpFailed, match=r"(?s)xllamacpp==.*no matching distribution.*Check the network"):
        peer_python(tmp_path)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    available = [2, 3, 5]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(available), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    return available


def test_the_client_takes_the_first_core_that_the_server_has_not(cores: list[int]) -> None:
    assert plan_of(["--core", "2"]).client_core == 3
    assert plan_of(["--core", "5"]).client_core == 2
    assert plan_of(["--core", "5", "--client-core", "3"]).client_core == 3
    cores[:] = [4]
    assert plan_of(["--core", "4"]).client_core == 4


@pytest.mark.parametrize("flag", ["--core", "--client-core"])
def test_a_core_that_is_not_there_is_refused_with_those_that_are(cores: list[int], flag: str) -> None:
    with pytest.raises(SetUpFailed, match=f"{flag} 7 is not here; available are 2, 3, 5"):
        plan_of([*(["--core", "2"] if flag == "--client-core" else []), flag, "7"])


def test_workloads_run_in_their_own_order_and_flags_are_handed_on(cores: list[int]) -> None:
    plan = plan_of(["--core", "2", "--workloads", "long", "single", "--backend-flag=--host-cache-mb=0"])
    assert plan.workloads == ("single", "long")
    assert plan.backend_flags == ("--host-cache-mb=0",)


def test_a_wrong_workload_is_refused_with_the_names_there_are(
    cores: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan_of(["--workloads", "stedy"])
    assert "seen_once" in capsys.readouterr().err
