"""Child processes, with small scripts in place of the services."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from phaseroute.local import tether
from phaseroute.local.child import Child, StartFailed, last_line
from phaseroute.local.plan import Service, StackPlan, free_ports
from phaseroute.local.stack import Phase, Stack

SERVES = """
import signal, sys, threading, grpc
from concurrent import futures
# Waited for and not handled: a handler that sets an event may come while that very event is about to be waited for.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
server = grpc.server(futures.ThreadPoolExecutor(4))
servicer = health.HealthServicer()
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(sys.argv[1])
server.start()
signal.sigwait({signal.SIGTERM})
server.stop(None).wait()  # or a call that is not over yet keeps the process alive
print("goodbye")
"""
DEAF = SERVES.replace("signal.sigwait({signal.SIGTERM})", "threading.Event().wait()")
DIES = 'import sys; print(\'{"event": "cannot start", "error": "no model"}\'); sys.exit(3)'


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a service of a script's text."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name: str, script: str) -> Service:
        (tmp_path / f"{name}_module.py").write_text(textwrap.dedent(script))
        address = f"127.0.0.1:{free_ports(1)[0]}"
        return Service(name, f"{name}_module", (address,), address)

    return make


async def test_ready_once_healthy_and_stopped_when_asked(service, tmp_path: Path):
    child = await Child.start(service("serves", SERVES), tmp_path)
    await child.ready()
    await child.stop(grace_s=20)
    assert child.process.returncode == 0
    assert last_line(child.log) == "goodbye"


async def test_one_that_dies_at_start_says_why(service, tmp_path: Path):
    child = await Child.start(service("dies", DIES), tmp_path)
    with pytest.raises(StartFailed, match=r"dies stopped \(exit code 3\): cannot start: no model .*dies\.log"):
        await child.ready()


async def test_one_that_will_not_stop_is_killed(service, tmp_path: Path):
    child = await Child.start(service("deaf", DEAF), tmp_path)
    await child.ready()
    await child.stop(grace_s=0.2)
    assert child.process.returncode == -signal.SIGKILL


class TestStack:
    async def test_starts_and_stops_everything(self, service, tmp_path: Path):
        plan = StackPlan((service("one", SERVES), service("two", SERVES)), service("router", SERVES))
        seen: list[tuple[str, Phase]] = []
        async with Stack(plan, tmp_path, lambda member: seen.append((member.service.name, member.phase))) as stack:
            await stack.start_backends()
            await stack.start_router()
            pids = [member.pid for member in stack.members.values()]
            assert {member.phase for member in stack.members.values()} == {Phase.READY}
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert seen.index(("router", Phase.STOPPED)) < seen.index(("one", Phase.STOPPING))

    async def test_a_death_at_start_stops_the_others(self, service, tmp_path: Path):
        plan = StackPlan((service("one", SERVES), service("dies", DIES)), service("router", SERVES))
        with pytest.raises(StartFailed, match="no model"):
            async with Stack(plan, tmp_path, lambda _: None) as stack:
                await stack.start_backends()
        assert not any(psutil.pid_exists(member.pid) for member in stack.members.values())

    async def test_a_death_later_is_noticed(self, service, tmp_path: Path):
        plan = StackPlan((service("one", SERVES), service("two", SERVES)), service("router", SERVES))
        async with Stack(plan, tmp_path, lambda _: None) as stack:
            await stack.start_backends()
            os.kill(stack.members["two"].pid, signal.SIGKILL)
            ended = await asyncio.wait_for(stack.next_end(), 20)
            assert ended.service.name == "two"
            assert "killed by SIGKILL" in ended.obituary()
            assert stack.members["two"].phase is Phase.FAILED

    async def test_cancelled_while_stopping_it_kills(self, service, tmp_path: Path):
        plan = StackPlan((service("deaf", DEAF),), service("router", SERVES))
        asked = asyncio.Event()
        stack = Stack(plan, tmp_path, lambda member: asked.set() if member.phase is Phase.STOPPING else None)
        await stack.start_backends()
        stopping = asyncio.create_task(stack.stop())
        await asyncio.wait_for(asked.wait(), 20)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(stopping, 20)
        assert not psutil.pid_exists(stack.members["deaf"].pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_tethered_program_dies_with_its_parent():
    parent = (
        f"import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-I', '-S', {tether.__file__!r}, "
        "str(os.getpid()), sys.executable, '-c', 'print(1, flush=True); import time; time.sleep(60)'], "
        "stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        orphan = psutil.Process(int(process.stdout.readline()))
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs([orphan], timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (b"", "it said nothing"),
        (b"first\nlast\n\n", "last"),
        (b'{"event": "broke", "error": "out of memory", "level": "error"}\n', "broke: out of memory"),
        (b'{"event": "serving"}\n', "serving"),
        (b'{"no": "event"}\n', '{"no": "event"}'),
        (b"[1]\n", "[1]"),
        (b"\xff\xfe\n", "\ufffd\ufffd"),
        (b"x" * 100_000 + b"\nend\n", "end"),
    ],
)
def test_last_line(tmp_path: Path, log: bytes, says: str):
    path = tmp_path / "log"
    path.write_bytes(log)
    assert last_line(path) == says
