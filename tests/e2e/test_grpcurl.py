"""Every command on the grpcurl page, as written there, against a running stack."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.command import Running

PAGE = (Path(__file__).parents[2] / "clients/grpcurl/README.md").read_text()
GRPCURL = Path(sys.executable).parent / "grpcurl"
DEFAULT_TARGET = "localhost:50051"


@dataclass(frozen=True, slots=True)
class Command:
    line: str
    exit_code: int

    @property
    def method(self) -> str:
        """What it calls: `list`, `describe`, or a method's name."""
        words = shlex.split(self.line)
        return next((word for word in ("list", "describe") if word in words), words[-1].rpartition("/")[2])


def commands() -> list[Command]:
    found = []
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
        code = re.search(r"# exit code (\d+)", block)
        lines = re.sub(r"^#.*\n", "", block, flags=re.MULTILINE)
        found += [
            Command(f"grpcurl{line}".strip(), int(code[1]) if code else 0)
            for line in re.split(r"^grpcurl", lines, flags=re.MULTILINE)[1:]
        ]
    return found


def run(command: Command, target: str) -> subprocess.CompletedProcess[str]:
    program, *words = shlex.split(command.line.replace("\\\n", " "))
    assert program == "grpcurl"
    assert words.count(DEFAULT_TARGET) == 1
    words[words.index(DEFAULT_TARGET)] = target
    return subprocess.run([GRPCURL, *words], capture_output=True, text=True, timeout=60)


def messages(text: str) -> list[dict]:
    """The JSON objects that grpcurl prints one after the other."""
    found, decoder, rest = [], json.JSONDecoder(), text.lstrip()
    while rest:
        message, end = decoder.raw_decode(rest)
        found.append(message)
        rest = rest[end:].lstrip()
    return found


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.line[:90])
def test_it_works_as_written(command: Command, stack: Running):
    result = run(command, stack.target)
    assert result.returncode == command.exit_code, result.stderr
    if command.exit_code:
        assert result.stderr.startswith("ERROR:")
    elif command.method == "list":
        assert {"phaseroute.v1.InferenceService", "phaseroute.v1.RouterService"} <= set(result.stdout.split())
    elif command.method == "describe":
        assert "phaseroute.v1" in result.stdout
    else:
        answers = messages(result.stdout)
        assert answers
        if command.method == "Generate":
            assert all("delta" in answer for answer in answers[:-1])
            assert answers[-1]["finished"]["routing"]["backend"] in ("fast", "small")


def test_every_call_that_ends_is_on_the_page():
    shown = {command.method for command in commands()}
    assert shown >= {
        "list", "describe", "Generate", "Status", "CacheProbe", "Route", "ListBackends", "DrainBackend", "Check",
    }  # fmt: skip


def test_the_error_shown_is_the_error_sent(stack: Running):
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown
    command = next(command for command in commands() if command.exit_code == 67)
    assert run(command, stack.target).stderr.split() == shown[1].split()
