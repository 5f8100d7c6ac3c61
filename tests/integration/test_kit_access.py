"""Tokens and scopes, as a client meets them."""

import asyncio
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from service_kit.access import SCOPES
from service_kit.channels import ConnectionLimits
from service_kit.identity import Caller, Scope, current_caller
from service_kit.peer_channel import PeerSecurity
from service_kit.protection import Protection
from tests.integration.kit import INFERENCE, ask, collect, details_of, failure, probe, serving
from tests.tokens import bearer, token_of, write_token, write_tokens

pytestmark = pytest.mark.timeout(60)

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
FORBIDDEN = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    clients = {"alice": [Scope.GENERATE], "viewer": [Scope.STATUS], "root": [Scope.ADMIN]}
    return write_tokens(tmp_path / "tokens.toml", clients)


def damage(path: Path) -> None:
    path.write_text("[clients.alice")


def test_every_method_of_ours_has_a_scope() -> None:
    services: list[ServiceDescriptor] = [
        *pb.DESCRIPTOR.services_by_name.values(),
        *router_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods == SCOPES.keys()


async def test_a_call_without_a_token_that_is_known_is_refused_and_told_what_to_do(tokens: Path) -> None:
    async with serving(protection=Protection(token_file=tokens)) as running:
        for metadata, words in (
            ((), "authorization: Bearer TOKEN"),
            ((("authorization", "Basic YTpi"),), "once, as"),
            ((("authorization", "Bearer "),), "once, as"),
            ((*bearer("alice"), *bearer("alice")), "once, as"),
            (bearer("mallory"), "not known"),
        ):
            for call in (
                running.stub.CacheProbe(probe(), metadata=metadata),
                collect(running.stub.Generate(ask(), metadata=metadata)),
                running.stub.Status(pb.StatusRequest(), metadata=metadata),
            ):
                error = await failure(call)
                assert (error.code(), words in error.details()) == (UNAUTHENTICATED, True)
                assert details_of(error)["ErrorInfo"].reason == "UNAUTHENTICATED"
                assert "mallory" not in error.details()
        # Upper case is as good, and health asks for nothing.
        await running.stub.CacheProbe(probe(), metadata=[("authorization", f"BEARER {token_of('alice')}")])
        await running.health.Check(health_pb2.HealthCheckRequest())


async def test_a_scope_that_is_missing_is_named(tokens: Path) -> None:
    async with serving(protection=Protection(token_file=tokens)) as running:
        assert await collect(running.stub.Generate(ask(), metadata=bearer("alice")))
        error = await failure(running.stub.Status(pb.StatusRequest(), metadata=bearer("alice")))
        assert error.code() is FORBIDDEN
        assert 'Status needs the scope "status", which the token of alice does not have' in error.details()
        assert details_of(error)["ErrorInfo"].reason == "FORBIDDEN"
        assert (await running.stub.Status(pb.StatusRequest(), metadata=bearer("viewer"))).status
        error = await failure(collect(running.stub.Generate(ask(), metadata=bearer("viewer"))))
        assert error.code() is FORBIDDEN


async def test_a_handler_knows_who_calls(tmp_path: Path) -> None:
    seen: list[Caller] = []

    async def cache_probe(request: pb.CacheProbeRequest, context: object) -> pb.CacheProbeResponse:
        await asyncio.sleep(0)
        seen.append(current_caller())
        return pb.CacheProbeResponse()

    clients = {name: [Scope.GENERATE] for name in ("alice", "bob")}
    path = write_tokens(tmp_path / "t.toml", clients, weight=2.0, max_in_flight=3, tokens_per_minute=1000)
    async with serving(protection=Protection(token_file=path), CacheProbe=cache_probe) as running:
        # Each call has its own, also side by side on one connection.
        names = ["alice", "bob"] * 10
        await asyncio.gather(*(running.stub.CacheProbe(probe(), metadata=bearer(name)) for name in names))
    assert sorted(caller.name for caller in seen) == sorted(names)
    assert {(each.weight, each.max_in_flight, each.tokens_per_minute) for each in seen} == {(2.0, 3, 1000)}
    assert len({each.cache_salt for each in seen}) == 2


async def test_a_refused_message_is_not_read(tokens: Path) -> None:
    """Else it would be refused for its size."""
    too_large = probe("x" * (ConnectionLimits().message_bytes + 1024))
    async with serving(protection=Protection(token_file=tokens)) as running:
        assert (await failure(running.stub.CacheProbe(too_large))).code() is UNAUTHENTICATED
        error = await failure(running.stub.CacheProbe(too_large, metadata=bearer("alice")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_changes_of_the_file_count_at_once_and_damage_does_not(tokens: Path) -> None:
    async with serving(protection=Protection(token_file=tokens)) as running:
        assert (await running.stub.CacheProbe(probe(), metadata=bearer("alice"))).prompt_tokens == 2
        damage(tokens)
        assert (await running.stub.CacheProbe(probe(), metadata=bearer("alice"))).prompt_tokens == 2
        write_tokens(tokens, {"bob": [Scope.GENERATE]})
        assert (await failure(running.stub.CacheProbe(probe(), metadata=bearer("alice")))).code() is UNAUTHENTICATED
        assert (await running.stub.CacheProbe(probe(), metadata=bearer("bob"))).prompt_tokens == 2


async def test_a_channel_brings_the_token_of_its_file(tokens: Path, tmp_path: Path) -> None:
    own = write_token(tmp_path / "own", "alice")
    security = PeerSecurity(token_file=own)
    async with serving(protection=Protection(token_file=tokens), security=security) as running:
        assert await collect(running.stub.Generate(ask(), metadata=[("x-request-id", "7")]))
        write_token(own, "viewer")
        assert (await failure(running.stub.CacheProbe(probe()))).code() is FORBIDDEN
        assert (await running.stub.Status(pb.StatusRequest())).status


async def test_reflection_needs_the_scope_status_or_is_not_there(tokens: Path) -> None:
    async def lists(running: object, metadata: object = ()) -> grpc.StatusCode:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        call = stub.ServerReflectionInfo(iter([request]), metadata=metadata)
        await asyncio.gather(collect(call), return_exceptions=True)
        return await call.code()

    async with serving(protection=Protection(token_file=tokens)) as running:
        assert await lists(running, bearer("viewer")) is grpc.StatusCode.OK
        assert await lists(running, bearer("alice")) is FORBIDDEN
        assert await lists(running) is UNAUTHENTICATED
    async with serving(protection=Protection(token_file=tokens, reflection=False)) as running:
        assert await lists(running, bearer("viewer")) is grpc.StatusCode.UNIMPLEMENTED


async def test_what_has_no_handler_stays_unimplemented(tokens: Path) -> None:
    async with serving(protection=Protection(token_file=tokens)) as running:
        error = await failure(running.channel.unary_unary(f"/{INFERENCE}/Nonsense")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
