"""TLS, certificates and tokens on both of a router's hops."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import grpc
import pytest

from phaseroute.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from router_service.backend import State
from service_kit.identity import Scope
from service_kit.protection import Protection
from service_kit.serve import Server, Service
from tests.certificates import Authority
from tests.integration.stub_backend import StubBackend, request, router
from tests.tokens import bearer, write_token, write_tokens

pytestmark = pytest.mark.timeout(60)

FOR_ROUTERS = (Scope.GENERATE, Scope.STATUS, Scope.ROUTE)


def protected(stub: StubBackend, protection: Protection) -> Server:
    service = Service("phaseroute.v1.InferenceService", partial(add_InferenceServiceServicer_to_server, stub))
    return Server([service], address="127.0.0.1:0", protection=protection)


async def test_a_client_is_known_to_the_router_and_named_to_the_backend(tmp_path: Path):
    authority = Authority(tmp_path / "ca")
    shown = authority.pair("client")
    stub = StubBackend()
    protection = Protection(
        tls=authority.server(client_ca=True),
        token_file=write_tokens(tmp_path / "backend.toml", {"router": list(FOR_ROUTERS)}),
    )
    async with (
        protected(stub, protection) as server,
        router(
            {"gpu": server.target},
            backend_tls_ca=authority.ca,
            backend_tls_cert=shown.cert,
            backend_tls_key=shown.key,
            backend_token_file=write_token(tmp_path / "token", "router"),
            tokens=write_tokens(tmp_path / "router.toml", {"alice": [Scope.GENERATE]}),
        ) as routed,
    ):
        call = routed.inference.Generate(request(), metadata=bearer("alice"))
        assert [response async for response in call][-1].finished.routing.backend == "gpu"
        (arrived,) = stub.requests
        assert (arrived.attempt.client, arrived.attempt.client_weight) == ("alice", 1.0)
        assert dict(stub.metadata[0])["authorization"] != bearer("alice")[0][1]

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await routed.generate()
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_router_that_a_backend_does_not_let_in_says_so(tmp_path: Path):
    authority = Authority(tmp_path / "ca")
    async with (
        protected(StubBackend(), Protection(tls=authority.server())) as server,
        router({"gpu": server.target}, ready=False) as routed,
    ):
        gpu = routed.router.fleet.backends["gpu"]
        await routed.wait(lambda router: "UNAVAILABLE" in gpu.detail)
        assert gpu.state is State.CONNECTING
