"""Where a server listens, and what it says about itself: addresses, health, reflection."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit import healthcheck
from service_kit.channels import SERVER_OPTIONS, open_channel
from service_kit.faults import StartupFailed
from service_kit.serve import Server
from tests.integration.kit import (
    INFERENCE,
    NOT_SERVING,
    PATIENCE_S,
    SERVING,
    collect,
    failure,
    inference,
    listening_but_dead,
    probe,
    serving,
)

pytestmark = pytest.mark.timeout(60)


async def test_a_unix_socket(tmp_path: Path) -> None:
    async with serving(address=f"unix:{tmp_path}/kit.sock") as running:
        assert (await running.stub.CacheProbe(probe())).prompt_tokens == 2


async def test_a_port_in_use_is_said_with_what_to_do() -> None:
    async with serving() as running:
        for host in ("127.0.0.1", "0.0.0.0", "localhost"):
            with pytest.raises(StartupFailed, match=r"in use.*choose another port"):
                async with serving(address=f"{host}:{running.server.port}"):
                    pass
        # gRPC itself refuses as well, should another process have been faster than the check.
        with pytest.raises(RuntimeError):
            grpc.aio.server(options=SERVER_OPTIONS).add_insecure_port(running.server.target)
        assert (await running.stub.CacheProbe(probe())).prompt_tokens == 2


@pytest.mark.parametrize(
    "address",
    [
        "",
        "50051",
        "127.0.0.1",
        ":50051",
        "127.0.0.1:99999",
        "127.0.0.1:http",
        "no.such.host.invalid:0",
        "192.0.2.1:0",
        "unix:/nonexistent/folder/kit.sock",
    ],
)
async def test_a_bad_address_is_said(address: str) -> None:
    with pytest.raises(StartupFailed, match=r"Cannot listen on .*(use|write)"):
        async with serving(address=address):
            pass


async def test_a_restarted_server_is_found_again_by_the_same_channel() -> None:
    async with serving() as first:
        port = first.server.port
        channel = open_channel(first.server.target)
        stub = pb_grpc.InferenceServiceStub(channel)
        await stub.CacheProbe(probe())
    error = await failure(stub.CacheProbe(probe()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    async with serving(address=f"127.0.0.1:{port}"):
        answer = await stub.CacheProbe(probe(), wait_for_ready=True, timeout=PATIENCE_S)
        assert answer.prompt_tokens == 2
    await channel.close()


async def test_health_starts_not_serving_and_watch_sees_each_change() -> None:
    async with (
        Server([inference()], address="127.0.0.1:0") as server,
        open_channel(server.target) as channel,
        asyncio.timeout(PATIENCE_S),
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", INFERENCE)]
        for expected in (None, SERVING, NOT_SERVING, SERVING):
            if expected is not None:
                await server.set_serving(expected == SERVING)
            for watch, name in zip(watches, ("", INFERENCE), strict=True):
                assert (await watch.read()).status == (expected or NOT_SERVING)
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == (expected or NOT_SERVING)
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="x"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        error = await failure(stub.Check(health_pb2.HealthCheckRequest(service="x")))
        assert error.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes(version: str) -> None:
    names = [INFERENCE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    # Tools give up when they cannot look up a name that was listed.
    requests += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in names]
    async with serving() as running:
        call = running.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )(iter(requests))
        listed, *described = await collect(call)
    assert sorted(service.name for service in listed.list_services_response.service) == sorted(names)
    assert all(answer.file_descriptor_response.file_descriptor_proto for answer in described)


async def test_healthcheck_says_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    async def checked(*argv: str) -> tuple[int, str]:
        code = await asyncio.to_thread(healthcheck.main, argv)
        output = capsys.readouterr()
        assert (output.out + output.err).count("\n") == 1
        return code, output.out + output.err

    async with serving() as running:
        at = ("--addr", running.server.target)
        assert await checked(*at) == (0, f"the server at {running.server.target} is SERVING\n")
        assert (await checked(*at, "--service", INFERENCE))[0] == 0
        code, line = await checked(*at, "--service", "x")
        assert (code, "x" in line) == (1, True)
        await running.server.set_serving(False)
        code, line = await checked(*at)
        assert (code, "NOT_SERVING" in line) == (1, True)
    code, line = await checked(*at, "--timeout", "0.3")
    assert (code, "within 0.3 s" in line) == (2, True)
    with listening_but_dead() as dead:
        assert (await checked("--addr", dead, "--timeout", "0.3"))[0] == 2
