"""What both services share, over real gRPC on loopback."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit import healthcheck
from service_kit.channels import MAX_MESSAGE_BYTES, SERVER_OPTIONS, open_channel
from service_kit.errors import from_rpc_error
from service_kit.faults import EngineFailed, Fault, InvalidRequest, Overloaded, StartupFailed, Unavailable, UnknownName
from service_kit.serve import Server, Service
from service_kit.telemetry import Attr, Telemetry
from tests.integration.collector import collecting

INFERENCE = "phaseroute.v1.InferenceService"
PATIENCE_S = 10.0
"""Nothing here takes a second; a call that hangs fails its test after this."""

pytestmark = pytest.mark.timeout(60)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Running:
    """A server and a channel to it."""

    server: Server
    channel: grpc.aio.Channel
    stub: pb_grpc.InferenceServiceStub
    health: health_pb2_grpc.HealthStub


@asynccontextmanager
async def serving(
    *,
    address: str = "127.0.0.1:0",
    telemetry: Telemetry | None = None,
    drain_grace_s: float = PATIENCE_S,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    **handlers: Callable[..., object],
) -> AsyncIterator[Running]:
    """A server whose InferenceService has these handlers and otherwise echoes."""
    async with (
        Server(
            [inference(**handlers)],
            address=address,
            telemetry=telemetry,
            drain_grace_s=drain_grace_s,
            on_drain=on_drain,
        ) as server,
        open_channel(server.target) as channel,
    ):
        await server.set_serving(True)
        yield Running(server, channel, pb_grpc.InferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel))


def inference(**handlers: Callable[..., object]) -> Service:
    servicer = pb_grpc.InferenceServiceServicer()
    for name, handler in {"Generate": echo, "CacheProbe": count, "Status": status, **handlers}.items():
        setattr(servicer, name, handler)
    return Service(INFERENCE, partial(pb_grpc.add_InferenceServiceServicer_to_server, servicer))


async def echo(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
    yield delta(request.prompt.text)
    yield pb.GenerateResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_EOS))


async def count(request: pb.CacheProbeRequest, context: grpc.aio.ServicerContext) -> pb.CacheProbeResponse:
    return pb.CacheProbeResponse(prompt_tokens=len(request.prompt.text))


async def status(request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusResponse:
    return pb.StatusResponse(status=pb.BackendStatus(incarnation="i"))


def delta(text: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text))


def ask(text: str = "hi") -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=pb.Prompt(text=text))


def probe(text: str = "hi") -> pb.CacheProbeRequest:
    return pb.CacheProbeRequest(prompt=pb.Prompt(text=text))


async def collect(call: grpc.aio.UnaryStreamCall) -> list[pb.GenerateResponse]:
    async with asyncio.timeout(PATIENCE_S):
        return [response async for response in call]


async def failure(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(PATIENCE_S):
            await call
    return caught.value


def details_of(error: grpc.aio.AioRpcError) -> dict[str, object]:
    found = {}
    rich = rpc_status.from_call(error)
    for detail in rich.details if rich else ():
        message = getattr(error_details_pb2, detail.TypeName().rpartition(".")[2])()
        assert detail.Unpack(message)
        found[message.DESCRIPTOR.name] = message
    return found


# --- errors


FAULTS = [
    (InvalidRequest("max_new_tokens", "is 0; ask for at least 1"), grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownName("There is no backend tpu; use cpu or gpu."), grpc.StatusCode.NOT_FOUND),
    (Overloaded("The queue is full; try again in 2 s.", 2.0), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable("No backend serves; start one."), grpc.StatusCode.UNAVAILABLE),
    (EngineFailed("The engine failed; send it again. " + "é" * 20_000), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("fault", "code"), FAULTS)
async def test_a_fault_arrives_with_code_message_and_details(fault: Fault, code: grpc.StatusCode) -> None:
    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        yield delta("before")
        raise fault

    async def cache_probe(request: object, context: object) -> pb.CacheProbeResponse:
        raise fault

    async with serving(Generate=generate, CacheProbe=cache_probe) as running:
        for error in (
            await failure(collect(running.stub.Generate(ask()))),
            await failure(running.stub.CacheProbe(probe())),
        ):
            assert error.code() is code
            assert str(fault).startswith(error.details().removesuffix("…"))
            info = details_of(error)["ErrorInfo"]
            assert (info.reason, info.domain) == (fault.reason, "phaseroute")
            if isinstance(fault, InvalidRequest):
                assert details_of(error)["BadRequest"].field_violations[0].field == "max_new_tokens"
            if isinstance(fault, Overloaded):
                assert details_of(error)["RetryInfo"].retry_delay.ToMilliseconds() == 2000


@pytest.mark.parametrize(("fault", "code"), FAULTS)
async def test_a_backends_error_passes_a_router_unchanged(fault: Fault, code: grpc.StatusCode) -> None:
    async def backend_generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        raise fault
        yield

    async with serving(Generate=backend_generate) as backend:

        async def generate(request: pb.GenerateRequest, context: object) -> AsyncIterator[pb.GenerateResponse]:
            try:
                async for response in backend.stub.Generate(request):
                    yield response
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

        async with serving(Generate=generate) as router:
            direct = await failure(collect(backend.stub.Generate(ask())))
            relayed = await failure(collect(router.stub.Generate(ask())))
            assert relayed.code() is direct.code() is code
            assert relayed.details() == direct.details()
            assert details_of(relayed) == details_of(direct)


async def test_a_backends_cancelled_does_not_reach_the_client() -> None:
    async def gives_up(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        await context.abort(grpc.StatusCode.CANCELLED, "backend lost interest")
        yield

    async with serving(Generate=gives_up) as backend:

        async def generate(request: pb.GenerateRequest, context: object) -> AsyncIterator[pb.GenerateResponse]:
            async for response in backend.stub.Generate(request):
                yield response

        async with serving(Generate=generate) as router:
            error = await failure(collect(router.stub.Generate(ask())))
            assert error.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "raw",
    [b"\x32\x02\xff\xfe", b"\x0a\x04\x0a\x02\xff\xfe", b"\x0a\xff", b"\xff\xff\xff"],
    ids=["utf8", "nested-utf8", "cut", "garbage"],
)
@pytest.mark.parametrize("method", ["Generate", "CacheProbe"])
async def test_bytes_that_do_not_parse_are_the_clients_fault(raw: bytes, method: str) -> None:
    async with serving() as running:
        if method == "Generate":
            error = await failure(collect(running.channel.unary_stream(f"/{INFERENCE}/{method}")(raw)))
        else:
            # The same bytes in field 1, which is the prompt here as well.
            error = await failure(running.channel.unary_unary(f"/{INFERENCE}/{method}")(raw.replace(b"\x32", b"\x0a")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "UTF-8" in error.details()
        assert details_of(error)["BadRequest"].field_violations[0].field == "request"
        assert (await running.stub.CacheProbe(probe("abc"))).prompt_tokens == 3


@pytest.mark.parametrize("breakage", ["raises", "returns nonsense"])
async def test_a_bug_is_internal_and_its_text_stays_in_the_log(breakage: str) -> None:
    async def generate(request: object, context: object) -> AsyncIterator[object]:
        if breakage == "raises":
            raise KeyError("secret prompt")
        yield "secret prompt"

    async def cache_probe(request: object, context: object) -> object:
        if breakage == "raises":
            raise KeyError("secret prompt")
        return None

    async with serving(Generate=generate, CacheProbe=cache_probe) as running:
        with structlog.testing.capture_logs() as logged:
            errors = [
                await failure(collect(running.stub.Generate(ask()))),
                await failure(running.stub.CacheProbe(probe())),
            ]
        for error in errors:
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in error.details()
            assert details_of(error)["ErrorInfo"].reason == "INTERNAL"
        assert [(entry["method"], entry["exc_info"]) for entry in logged] == [
            (f"/{INFERENCE}/Generate", True),
            (f"/{INFERENCE}/CacheProbe", True),
        ]


async def test_a_handlers_own_abort_is_left_alone() -> None:
    async def cache_probe(request: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")

    async with serving(CacheProbe=cache_probe) as running:
        error = await failure(running.stub.CacheProbe(probe()))
        assert (error.code(), error.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "not now")


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving() as running:
        error = await failure(running.channel.unary_unary(f"/{INFERENCE}/Nonsense")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


# --- cancellation


async def cancelled_inside() -> None:
    """What a call or task of ours that something cancelled looks like from outside."""
    task = asyncio.ensure_future(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(task.cancel)
    await task


async def test_a_local_cancel_does_not_leave_the_client_hanging() -> None:
    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        yield delta("first")
        await cancelled_inside()

    async def cache_probe(request: object, context: object) -> pb.CacheProbeResponse:
        await cancelled_inside()
        raise AssertionError

    async with serving(Generate=generate, CacheProbe=cache_probe) as running:
        for error in (
            await failure(collect(running.stub.Generate(ask()))),
            await failure(running.stub.CacheProbe(probe())),
        ):
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert details_of(error)["ErrorInfo"].reason == "UNAVAILABLE"


@pytest.mark.parametrize("blocked_in", ["handler", "write"])
async def test_a_clients_cancel_runs_the_handlers_finally(blocked_in: str) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield delta("first")
            entered.set()
            if blocked_in == "handler":
                await asyncio.Event().wait()
            while True:
                yield delta("x" * 1_000_000)
        finally:
            left.set()

    async with serving(Generate=generate) as running:
        call = running.stub.Generate(ask())
        await call.read()
        async with asyncio.timeout(PATIENCE_S):
            await entered.wait()
            call.cancel()
            await left.wait()
        # And the server is as good as new.
        assert (await running.stub.CacheProbe(probe())).prompt_tokens == 2


async def test_a_deadline_runs_the_handlers_finally() -> None:
    left = asyncio.Event()

    async def cache_probe(request: object, context: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async with serving(CacheProbe=cache_probe) as running:
        error = await failure(running.stub.CacheProbe(probe(), timeout=0.1))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(PATIENCE_S):
            await left.wait()


async def test_a_generator_is_closed_before_the_call_ends() -> None:
    order: list[str] = []

    async def generate(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
        context.add_done_callback(lambda _: order.append("call over"))
        try:
            yield "not a message"
        finally:
            for _ in range(20):
                await asyncio.sleep(0)  # cleaning up takes a while
            order.append("generator closed")

    async with serving(Generate=generate) as running:
        await failure(collect(running.stub.Generate(ask())))
        await running.server.drain()
    assert order == ["generator closed", "call over"]


# --- sizes and addresses


async def test_a_5_mib_message_passes_both_ways() -> None:
    text = "x" * 5 * 1024 * 1024
    async with serving() as running:
        [first, _] = await collect(running.stub.Generate(ask(text)))
        assert first.delta.text == text


async def test_a_message_over_the_limit_is_refused_on_both_ends() -> None:
    request = probe("x" * (MAX_MESSAGE_BYTES + 1024 * 1024))
    async with serving() as running:
        error = await failure(running.stub.CacheProbe(request))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        unlimited = (("grpc.max_send_message_length", -1),)
        async with grpc.aio.insecure_channel(running.server.target, options=unlimited) as channel:
            error = await failure(pb_grpc.InferenceServiceStub(channel).CacheProbe(request))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(MAX_MESSAGE_BYTES) in error.details()
        assert (await running.stub.CacheProbe(probe())).prompt_tokens == 2


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


# --- health and reflection


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


# --- drain


async def test_a_drain_finishes_streams_and_answers_observers() -> None:
    finish, told = asyncio.Event(), []

    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        yield delta("first")
        await finish.wait()
        yield delta("last")

    async def watch_status(request: object, context: object) -> AsyncIterator[pb.WatchStatusResponse]:
        while True:
            yield pb.WatchStatusResponse()
            await asyncio.Event().wait()

    async def on_drain() -> None:
        # Health has changed before the service is told.
        told.append((await running.health.Check(health_pb2.HealthCheckRequest())).status)

    async with (
        serving(Generate=generate, WatchStatus=watch_status, on_drain=on_drain) as running,
        asyncio.timeout(PATIENCE_S),
    ):
        health = running.health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await health.read()).status == SERVING
        # A stream without an end must not keep the drain from ending.
        watching = running.stub.WatchStatus(pb.WatchStatusRequest())
        await watching.read()
        stream = running.stub.Generate(ask())
        assert (await stream.read()).delta.text == "first"

        drain = asyncio.create_task(running.server.drain())
        assert (await health.read()).status == NOT_SERVING
        assert (await running.stub.Status(pb.StatusRequest())).status.incarnation == "i"
        assert (await running.health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        await running.server.set_serving(True)
        assert (await running.health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        refused = await failure(collect(running.stub.Generate(ask())))
        assert (refused.code(), "shutting down" in refused.details()) == (grpc.StatusCode.UNAVAILABLE, True)
        assert told == [NOT_SERVING]
        assert not drain.done()

        finish.set()
        assert (await stream.read()).delta.text == "last"
        assert await stream.code() is grpc.StatusCode.OK
        await drain
        assert await watching.code() is grpc.StatusCode.UNAVAILABLE
        assert (await failure(running.stub.Status(pb.StatusRequest()))).code() is grpc.StatusCode.UNAVAILABLE


async def test_the_grace_period_bounds_a_drain() -> None:
    left = asyncio.Event()

    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield delta("first")
            await asyncio.Event().wait()
        finally:
            left.set()

    async with serving(Generate=generate, drain_grace_s=0.1) as running, asyncio.timeout(PATIENCE_S):
        stream = running.stub.Generate(ask())
        await stream.read()
        await running.server.drain()
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        await left.wait()


async def test_an_idle_server_drains_at_once() -> None:
    async with serving(drain_grace_s=1000.0) as running:
        await running.stub.CacheProbe(probe())
        async with asyncio.timeout(PATIENCE_S):
            await running.server.drain()


async def test_a_failing_on_drain_is_heard_and_the_server_stops() -> None:
    async def on_drain() -> None:
        raise RuntimeError("could not say goodbye")

    async with serving(on_drain=on_drain) as running:
        with pytest.raises(RuntimeError, match="goodbye"):
            await running.server.drain()
        assert (await failure(running.stub.CacheProbe(probe()))).code() is grpc.StatusCode.UNAVAILABLE


# --- the process


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


# --- traces


@contextmanager
def listening_but_dead() -> Iterator[str]:
    """Connections are accepted by the kernel and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as dead:
        yield f"127.0.0.1:{dead.getsockname()[1]}"


async def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        now_s = time.monotonic()
        telemetry.past_span("prefill", now_s - 1.0, now_s, {Attr.CACHED_TOKENS: 496})
        yield delta("x")
        raise EngineFailed("The engine failed; send it again.")

    async with collecting() as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        telemetry = Telemetry.from_environment("backend")
        async with serving(telemetry=telemetry, Generate=generate) as running:
            parent = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
            await failure(collect(running.stub.Generate(ask(), metadata=[parent])))
            await running.stub.Status(pb.StatusRequest())
            await running.health.Check(health_pb2.HealthCheckRequest())
        # Leaving the server has flushed.
        [resource_spans] = [found for request in collector.requests for found in request.resource_spans]
    resource = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    assert resource["service.name"] == "backend"
    spans = {span.name: span for found in resource_spans.scope_spans for span in found.spans}
    assert set(spans) == {f"{INFERENCE}/Generate", "prefill"}
    server, prefill = spans[f"{INFERENCE}/Generate"], spans["prefill"]
    assert server.trace_id.hex() == prefill.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert server.parent_span_id.hex() == "b7ad6b7169203331"
    assert prefill.parent_span_id == server.span_id
    attributes = {item.key: item.value for item in server.attributes}
    assert attributes[Attr.RPC_METHOD].string_value == f"{INFERENCE}/Generate"
    assert attributes[Attr.RPC_STATUS].string_value == "INTERNAL"
    assert server.status.code == server.status.STATUS_CODE_ERROR
    assert prefill.end_time_unix_nano - prefill.start_time_unix_nano == pytest.approx(1e9, abs=1e3)


async def test_a_server_span_says_how_the_call_ended() -> None:
    entered = asyncio.Event()

    async def generate(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
        match request.prompt.text:
            case "hang":
                entered.set()
                await asyncio.Event().wait()
            case "abort":
                await context.abort(grpc.StatusCode.ABORTED, "")
            case "local cancel":
                await cancelled_inside()
        yield delta("x")

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serving(telemetry=Telemetry(provider), Generate=generate) as running:
        await collect(running.stub.Generate(ask("fine")))
        await failure(collect(running.stub.Generate(ask("abort"))))
        await failure(collect(running.stub.Generate(ask("local cancel"))))
        await failure(collect(running.channel.unary_stream(f"/{INFERENCE}/Generate")(b"\xff")))
        call = running.stub.Generate(ask("hang"))
        async with asyncio.timeout(PATIENCE_S):
            await entered.wait()
        call.cancel()
        await failure(collect(running.stub.Generate(ask("hang"), timeout=0.1)))
        await running.server.drain()
    ends = sorted(span.attributes[Attr.RPC_STATUS] for span in exporter.get_finished_spans())
    assert ends == ["ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "OK", "UNAVAILABLE"]


@pytest.mark.parametrize("kind", ["refuses", "never answers"])
async def test_a_dead_collector_costs_a_call_nothing_and_the_end_two_seconds(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening_but_dead() as dead:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{dead if kind != 'refuses' else '127.0.0.1:1'}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        telemetry = Telemetry.from_environment("backend")
        async with serving(telemetry=telemetry) as running:
            started_s = time.monotonic()
            for _ in range(20):
                await running.stub.CacheProbe(probe())
            # One export attempt alone would wait longer than that.
            assert time.monotonic() - started_s < 3.0
            started_s = time.monotonic()
            assert not await telemetry.shutdown()
            assert time.monotonic() - started_s < 3.0
            # Given up, not left behind: a thread inside of gRPC would trouble the end of the process.
            assert "telemetry-shutdown" not in {thread.name for thread in threading.enumerate()}


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
