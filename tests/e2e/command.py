"""Runs the `phaseroute` command as users do, and looks at what it leaves behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from phaseroute.local.plan import free_ports

SIMULATED_PAIR = f"""
[router]
listen = "127.0.0.1:{free_ports(1)[0]}"

[backends.fast]
engine = "simulated"
simulated_prefill_rate = 20000
simulated_decode_ms = "1:1,4:3"

[backends.small]
engine = "simulated"
simulated_prefill_rate = 2000
simulated_decode_ms = "1:4,4:8"
"""

PHASEROUTE = [sys.executable, "-m", "phaseroute.cli"]
WAIT_S = 60


class Running:
    """A command that goes on until it is told to stop."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output = ""

    @property
    def target(self) -> str:
        """The router's, as the command told it."""
        found = re.search(r"--target (\S+)", self.output)
        assert found, self.output
        return found[1]

    def read_until(self, text: str) -> str:
        """Output up to the line with this text. Fails when the command ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return self.output
        raise AssertionError(f"it ended with {self.process.wait()} before it said {text!r}:\n{self.output}")

    def descendants(self) -> list[psutil.Process]:
        """Its processes as they are now."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: signal.Signals) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait(WAIT_S)


@contextmanager
def running(*arguments: str) -> Iterator[Running]:
    """Start the command; it is gone when the block ends, and so must be everything that it started."""
    with subprocess.Popen(
        [*PHASEROUTE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        command = Running(process)
        try:
            yield command
        finally:
            if process.poll() is None:
                started = command.descendants()
                command.end(signal.SIGTERM)
                assert_gone(started)


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run([*PHASEROUTE, *arguments], capture_output=True, text=True, timeout=WAIT_S)


def tagged(variable: str, value: str) -> set[int]:
    """Processes with this in their environment: children inherit it, however they were started."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variable) == value:
                found.add(process.pid)
    return found


def assert_gone(processes: list[psutil.Process], timeout_s: float = 10) -> None:
    """None of them is left."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not alive
