"""How a call fails: faults, bugs and a backend's errors as gRPC statuses."""

from collections.abc import AsyncIterator

import grpc
import pytest
import structlog

from phaseroute.v1 import inference_pb2 as pb
from service_kit.errors import from_rpc_error
from service_kit.faults import EngineFailed, Fault, InvalidRequest, Overloaded, Unavailable, UnknownName
from tests.integration.kit import INFERENCE, ask, collect, delta, details_of, failure, probe, serving

pytestmark = pytest.mark.timeout(60)

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


@pytest.mark.parametrize("breakage", ["raises", "returns nonsense"])
async def test_a_bug_is_internal_and_its_text_goes_nowhere(breakage: str) -> None:
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
        # The log says what it is and where it is from.
        assert [entry["method"] for entry in logged] == [f"/{INFERENCE}/Generate", f"/{INFERENCE}/CacheProbe"]
        assert all(entry["error"].endswith("Error") and "in _guard" in entry["stack"] for entry in logged)
        assert "secret" not in str([entry["error"] for entry in logged])


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
