"""A server in a process of its own: signals, exit codes and what is left on stderr."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit.channels import open_channel
from tests.integration.kit import NOT_SERVING, SERVING, ask, listening_but_dead, probe

pytestmark = pytest.mark.timeout(60)

SCRIPT = """
import asyncio, os, signal, sys
from functools import partial
from phaseroute.v1 import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from service_kit.logs import configure_logs
from service_kit.serve import Server, Service, run
from service_kit.telemetry import Telemetry

class Inference(pb_grpc.InferenceServiceServicer):
    async def Generate(self, request, context):
        yield pb.GenerateResponse(delta=pb.Delta(text=type(asyncio.get_running_loop()).__module__))
        await asyncio.Event().wait()
    async def CacheProbe(self, request, context):
        server.request_stop(7)
        return pb.CacheProbeResponse()

async def main():
    global server
    configure_logs("json")
    if address == "before":
        print("ready", flush=True)
        await asyncio.Event().wait()
    register = partial(pb_grpc.add_InferenceServiceServicer_to_server, Inference())
    services = [Service("phaseroute.v1.InferenceService", register)]
    telemetry = Telemetry.from_environment("test")
    async with Server(services, address=address, telemetry=telemetry, drain_grace_s=60) as server:
        await server.set_serving(True)
        print(server.target, flush=True)
        return await server.run_until_stopped()

address = sys.argv[1]
sys.exit(run(main()))
"""


@contextmanager
def process(address: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def ended(child: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = child.communicate(timeout=30)
    return child.returncode, errors


async def test_sigterm_lets_a_stream_finish_and_a_second_one_does_not() -> None:
    with process("127.0.0.1:0") as child:
        async with open_channel(child.stdout.readline().strip()) as channel, asyncio.timeout(30):
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await health.read()).status == SERVING
            stream = pb_grpc.InferenceServiceStub(channel).Generate(ask())
            assert (await stream.read()).delta.text in ("uvloop", "asyncio.unix_events")
            child.send_signal(signal.SIGTERM)
            assert (await health.read()).status == NOT_SERVING
            assert not stream.done()
            child.send_signal(signal.SIGTERM)
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        code, errors = ended(child)
    assert code == 0
    assert "Traceback" not in errors


async def test_a_service_can_stop_its_process_with_a_code() -> None:
    with process("127.0.0.1:0") as child:
        async with open_channel(child.stdout.readline().strip()) as channel:
            await pb_grpc.InferenceServiceStub(channel).CacheProbe(probe())
        code, errors = ended(child)
    assert code == 7
    assert "Traceback" not in errors


def test_a_port_in_use_is_one_line_and_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, process(f"127.0.0.1:{taken.getsockname()[1]}") as child:
        code, errors = ended(child)
    assert code == 2
    assert errors.startswith("error: Cannot listen on 127.0.0.1:")
    assert errors.count("\n") == 1


def test_ctrl_c_while_starting_has_no_traceback() -> None:
    with process("before") as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert ended(child) == (130, "")


async def test_a_process_with_a_dead_collector_ends_cleanly() -> None:
    with (
        listening_but_dead() as dead,
        process("127.0.0.1:0", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{dead}", OTEL_BSP_SCHEDULE_DELAY="10") as child,
    ):
        async with open_channel(child.stdout.readline().strip()) as channel:
            await pb_grpc.InferenceServiceStub(channel).CacheProbe(probe())
        code, errors = ended(child)
    assert code == 7
    assert "some traces were not delivered" in errors
    assert "Traceback" not in errors
