"""A fleet behind mutual TLS and tokens: router and backend in this process, certificates and tokens on each hop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from backend_service.host import host as backend_host
from backend_service.settings import BackendSettings
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2, router_pb2_grpc
from router_service.backend import State
from router_service.host import Hosted
from router_service.host import host as router_host
from router_service.settings import RouterSettings
from service_kit.channels import open_channel
from service_kit.identity import Scope
from service_kit.peer_channel import PeerSecurity
from service_kit.tokens import load_tokens
from tests.certificates import Authority
from tests.integration.backends import FAST, collect, prompt_of, request
from tests.tokens import bearer, write_token, write_tokens

pytestmark = pytest.mark.timeout(60)

ROUTER = [Scope.GENERATE, Scope.STATUS, Scope.ROUTE]
CLIENTS = {
    "alice": [Scope.GENERATE],
    "bob": [Scope.GENERATE],
    "ops": [Scope.STATUS, Scope.ADMIN],
}
PROMPT = "a prompt that is long enough to leave something behind in the cache"


@dataclass
class Secured:
    """The fleet, and stubs that show a certificate; tokens are each call's own."""

    hosted: Hosted
    at_router: pb_grpc.InferenceServiceStub
    admin: router_pb2_grpc.RouterServiceStub
    at_backend: pb_grpc.InferenceServiceStub
    router_token: Path

    async def wait(self, condition) -> None:
        backend = self.hosted.router.fleet.backends["one"]
        with self.hosted.router.fleet.changes.subscribe() as changes:
            while not condition(backend):
                await changes.get()

    async def reused(self, stub: pb_grpc.InferenceServiceStub, name: str, **options: Any) -> int:
        """Tokens of PROMPT that a client's request found in the cache."""
        call = stub.Generate(request(PROMPT, max_new_tokens=2, **options), metadata=bearer(name))
        return (await collect(call)).finished.usage.cached_tokens

    async def probed(self, stub: pb_grpc.InferenceServiceStub, name: str, **options: Any) -> int:
        probe = pb.CacheProbeRequest(prompt=prompt_of(PROMPT), **options)
        return (await stub.CacheProbe(probe, metadata=bearer(name))).reusable_tokens


@asynccontextmanager
async def secured(tmp_path: Path, *, token_of: str = "router", **settings: Any) -> AsyncIterator[Secured]:
    """`token_of`: whose token the router brings along. `settings`: the router's."""
    authority = Authority(tmp_path / "ca")
    pair, own = authority.pair("server"), authority.client(cert=True)
    tls = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": authority.ca}
    router_token = write_token(tmp_path / "router.token", token_of)
    async with AsyncExitStack() as exits:
        backend = await exits.enter_async_context(
            backend_host(
                BackendSettings(
                    listen="127.0.0.1:0",
                    tokens=write_tokens(tmp_path / "b.toml", {"router": ROUTER, **CLIENTS}),
                    **tls,
                    **FAST,
                )
            )
        )
        hosted = await exits.enter_async_context(
            router_host(
                RouterSettings(
                    listen="127.0.0.1:0",
                    backend=[f"one={backend.server.target}"],
                    backend_tls_cert=own.cert,
                    backend_tls_key=own.key,
                    backend_token_file=router_token,
                    tokens=write_tokens(tmp_path / "r.toml", CLIENTS),
                    probe_timeout_s=5.0,
                    **tls,
                    **{"backend_tls_ca": authority.ca, **settings},
                )
            )
        )
        security = PeerSecurity(own)
        to_router = await exits.enter_async_context(open_channel(hosted.server.target, security))
        to_backend = await exits.enter_async_context(open_channel(backend.server.target, security))
        yield Secured(
            hosted,
            pb_grpc.InferenceServiceStub(to_router),
            router_pb2_grpc.RouterServiceStub(to_router),
            pb_grpc.InferenceServiceStub(to_backend),
            router_token,
        )


async def code_of(call: grpc.aio.UnaryUnaryCall) -> grpc.StatusCode:
    return await call.code()


async def test_clients_share_no_cache_unless_they_are_the_same(tmp_path: Path) -> None:
    async with secured(tmp_path) as fleet:
        await fleet.wait(lambda backend: backend.state is State.SERVING)
        assert await fleet.reused(fleet.at_router, "alice") == 0
        assert await fleet.reused(fleet.at_router, "bob") == 0
        assert await fleet.reused(fleet.at_router, "alice") > 0
        # The router passes on what a backend knows her by itself.
        assert await fleet.probed(fleet.at_router, "alice") > 0
        assert await fleet.probed(fleet.at_backend, "alice") > 0
        assert await fleet.probed(fleet.at_backend, "router") == 0


async def test_nobody_but_a_router_may_speak_for_others(tmp_path: Path) -> None:
    async with secured(tmp_path) as fleet:
        await fleet.wait(lambda backend: backend.state is State.SERVING)
        assert await fleet.reused(fleet.at_router, "alice") == 0
        hers = next(known.caller for known in load_tokens(tmp_path / "r.toml") if known.caller.name == "alice")
        claim = {"attempt": pb.Attempt(id="mine", client="alice", cache_salt=hers.cache_salt)}
        for stub in (fleet.at_router, fleet.at_backend):
            assert await fleet.probed(stub, "bob", cache_salt=hers.cache_salt) == 0
        assert await fleet.reused(fleet.at_router, "bob", **claim) == 0
        assert await fleet.probed(fleet.at_backend, "router", cache_salt=hers.cache_salt) > 0


async def test_scopes_hold_at_the_router(tmp_path: Path) -> None:
    async with secured(tmp_path, admin=True) as fleet:
        drain = router_pb2.DrainBackendRequest(backend="one", undo=True)
        listing = router_pb2.ListBackendsRequest()
        forbidden = grpc.StatusCode.PERMISSION_DENIED
        assert await code_of(fleet.admin.DrainBackend(drain, metadata=bearer("alice"))) is forbidden
        assert await code_of(fleet.admin.ListBackends(listing, metadata=bearer("alice"))) is forbidden
        assert await code_of(fleet.admin.DrainBackend(drain, metadata=bearer("ops"))) is grpc.StatusCode.OK
        assert await code_of(fleet.admin.ListBackends(listing, metadata=bearer("ops"))) is grpc.StatusCode.OK
    async with secured(tmp_path, admin=False) as fleet:
        assert await code_of(fleet.admin.DrainBackend(drain, metadata=bearer("ops"))) is forbidden
        assert await code_of(fleet.admin.ListBackends(listing, metadata=bearer("ops"))) is grpc.StatusCode.OK


async def test_a_router_with_a_wrong_token_says_so_and_works_once_its_file_is_right(tmp_path: Path) -> None:
    async with secured(tmp_path, token_of="mallory") as fleet:
        await fleet.wait(lambda backend: "not known here" in backend.detail)
        answer = fleet.at_router.Generate(request(PROMPT), metadata=bearer("alice"))
        assert await answer.code() is grpc.StatusCode.UNAVAILABLE
        write_token(fleet.router_token, "router")
        await fleet.wait(lambda backend: backend.state is State.SERVING)
        assert await fleet.reused(fleet.at_router, "alice") == 0


async def test_a_router_without_the_right_certificate_gets_no_backend(tmp_path: Path) -> None:
    async with secured(tmp_path, backend_tls_ca=Authority(tmp_path / "other").ca) as fleet:
        await fleet.wait(lambda backend: "CERTIFICATE_VERIFY_FAILED" in backend.detail)
