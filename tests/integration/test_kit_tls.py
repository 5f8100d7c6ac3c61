"""TLS between a client and a server: who is let in, and what changes without a restart."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import structlog

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit import healthcheck
from service_kit.certificates import ClientTls, ServerTls
from service_kit.channels import open_channel
from service_kit.faults import StartupFailed
from service_kit.peer_channel import PeerSecurity
from service_kit.protection import Protection
from tests.certificates import Authority
from tests.integration.kit import PATIENCE_S, ask, delta, probe, serving

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "one")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "another")


async def gets_in(target: str, tls: ClientTls | None) -> bool:
    async with open_channel(target, PeerSecurity(tls)) as channel:
        code = await pb_grpc.InferenceServiceStub(channel).CacheProbe(probe(), timeout=PATIENCE_S).code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return code is grpc.StatusCode.OK


async def test_tls_lets_in_who_believes_the_server(authority: Authority, stranger: Authority) -> None:
    async with serving(protection=Protection(tls=authority.server())) as running:
        assert await gets_in(running.server.target, authority.client())
        assert not await gets_in(running.server.target, stranger.client())
        assert not await gets_in(running.server.target, None)
        assert await gets_in(running.server.target, authority.client())


async def test_mutual_tls_lets_in_whom_the_server_believes(authority: Authority, stranger: Authority) -> None:
    async with serving(protection=Protection(tls=authority.server(client_ca=True))) as running:
        assert await gets_in(running.server.target, authority.client(cert=True))
        assert not await gets_in(running.server.target, authority.client())
        strange = stranger.client(cert=True)
        assert not await gets_in(running.server.target, ClientTls(authority.ca, strange.cert, strange.key))


async def test_tls_over_a_unix_socket(authority: Authority, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/kit.sock"
    async with serving(address=address, protection=Protection(tls=authority.server())):
        assert await gets_in(address, authority.client())


async def test_a_server_shows_new_certificates_to_new_connections(authority: Authority, stranger: Authority) -> None:
    """And goes on with the old ones while what is there cannot be used."""
    go_on = asyncio.Event()

    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        yield delta("first")
        await go_on.wait()
        yield delta("last")

    tls = authority.server()
    security = PeerSecurity(authority.client())
    async with (
        serving(protection=Protection(tls=tls), security=security, Generate=generate) as running,
        asyncio.timeout(PATIENCE_S),
    ):
        stream = running.stub.Generate(ask())
        await stream.read()
        target = running.server.target
        replacement = stranger.server()

        with structlog.testing.capture_logs() as logged:
            tls.cert.write_bytes(replacement.cert.read_bytes())  # the key follows later
            assert await gets_in(target, authority.client())
            tls.cert.write_text("damaged")
            assert await gets_in(target, authority.client())
        assert [entry["log_level"] for entry in logged] == ["warning", "warning"]

        tls.cert.write_bytes(replacement.cert.read_bytes())
        tls.key.write_bytes(replacement.key.read_bytes())
        assert await gets_in(target, stranger.client())
        assert not await gets_in(target, authority.client())

        go_on.set()
        assert (await stream.read()).delta.text == "last"


async def test_a_channel_changes_over_to_new_certificates(authority: Authority, stranger: Authority) -> None:
    """Without ending what runs on the old connection."""
    go_on, connections = asyncio.Event(), []

    async def cache_probe(request: object, context: grpc.aio.ServicerContext) -> pb.CacheProbeResponse:
        connections.append(context.peer())
        return pb.CacheProbeResponse()

    async def generate(request: object, context: object) -> AsyncIterator[pb.GenerateResponse]:
        yield delta("first")
        await go_on.wait()
        yield delta("last")

    server, client = authority.server(client_ca=True), authority.client(cert=True)
    async with (
        serving(
            protection=Protection(tls=server),
            security=PeerSecurity(client),
            Generate=generate,
            CacheProbe=cache_probe,
        ) as running,
        asyncio.timeout(PATIENCE_S),
    ):
        stream = running.stub.Generate(ask())
        await stream.read()
        await running.stub.CacheProbe(probe())
        # The server's side moves to another CA: now only the new certificates get in.
        theirs, ours = stranger.server(), stranger.client(cert=True)
        server.cert.write_bytes(theirs.cert.read_bytes())
        server.key.write_bytes(theirs.key.read_bytes())
        server.client_ca.write_bytes(stranger.ca.read_bytes())  # which is the client's own CA file as well
        client.cert.write_bytes(ours.cert.read_bytes())
        client.key.write_bytes(ours.key.read_bytes())

        await running.stub.CacheProbe(probe())
        await running.stub.CacheProbe(probe())
        assert connections[0] != connections[1] == connections[2]
        await running.channel.channel_ready()
        assert running.channel.get_state() is grpc.ChannelConnectivity.READY
        go_on.set()
        assert (await stream.read()).delta.text == "last"
        assert await stream.read() is grpc.aio.EOF


async def test_certificates_that_cannot_be_used_are_said_at_the_start(authority: Authority, tmp_path: Path) -> None:
    one, other = authority.pair("one"), authority.pair("other")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for tls, words in (
        (ServerTls(one.cert, other.key), "cannot be used together"),
        (ServerTls(nonsense, one.key), "cannot be used together"),
        (ServerTls(one.cert, tmp_path / "missing"), "No such file"),
        (ServerTls(one.cert, one.key, nonsense), "holds no CA certificate"),
    ):
        with pytest.raises(StartupFailed, match=words):
            async with serving(protection=Protection(tls=tls)):
                pass
    for client, words in ((ClientTls(nonsense), "no CA"), (ClientTls(authority.ca, one.cert), "go together")):
        with pytest.raises(StartupFailed, match=words):
            open_channel("127.0.0.1:1", PeerSecurity(client))


async def test_healthcheck_over_mutual_tls(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    client = authority.client(cert=True)
    async with serving(protection=Protection(tls=authority.server(client_ca=True))) as running:
        at = ("--addr", running.server.target, "--tls-ca", str(client.ca))
        shown = ("--tls-cert", str(client.cert), "--tls-key", str(client.key))
        assert await asyncio.to_thread(healthcheck.main, (*at, *shown)) == 0
        assert await asyncio.to_thread(healthcheck.main, (*at, "--timeout", "1")) == 2
    assert await asyncio.to_thread(healthcheck.main, (*at, "--tls-cert", str(client.cert))) == 2
    assert "both, or neither" in capsys.readouterr().err
