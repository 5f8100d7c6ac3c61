"""TLS and tokens of the library and the command, and `phaseroute token`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from phaseroute.aio import AsyncClient
from phaseroute.channels import Tls
from phaseroute.cli.app import app
from phaseroute.client import Client
from phaseroute.errors import PhaserouteError
from service_kit.certificates import ServerTls
from service_kit.identity import Scope
from service_kit.tokens import load_tokens
from tests.certificates import Authority, Pair
from tests.clients.fake_service import FakeService, serving

TOKEN = "phr_the-token"


class Headers(grpc.ServerInterceptor):
    """Records the tokens that calls bring."""

    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {}

    def intercept_service(self, continuation, details):
        tokens = [value for key, value in details.invocation_metadata if key == "authorization"]
        self.seen.setdefault(details.method.rpartition("/")[2], []).extend(tokens)
        return continuation(details)


@dataclass
class Guarded:
    """A service that asks for a client certificate, and what gets in."""

    target: str
    ca: Path
    own: Pair
    headers: Headers = field(default_factory=Headers)

    @property
    def tls(self) -> Tls:
        return Tls(self.ca, self.own.cert, self.own.key)

    @property
    def flags(self) -> list[str]:
        return ["--tls-ca", str(self.ca), "--tls-cert", str(self.own.cert), "--tls-key", str(self.own.key)]


@pytest.fixture
def guarded(service: FakeService, tmp_path: Path) -> Iterator[Guarded]:
    authority = Authority(tmp_path / "ca")
    pair, headers = authority.pair("server"), Headers()
    credentials = ServerTls(pair.cert, pair.key, authority.ca).credentials()
    with serving(service, credentials, [headers]) as target:
        yield Guarded(target, authority.ca, authority.pair("client"), headers)


@pytest.fixture
def phaseroute(guarded: Guarded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PHASEROUTE_TARGET", guarded.target)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    return run


def test_the_blocking_client(guarded: Guarded):
    with Client(guarded.target, tls=guarded.tls, token=TOKEN) as client:
        assert client.complete("echo a b").text == "a b"
        client.status()
        client.probe("echo a")
        client.route("echo a")
        client.backends()
        client.drain("fast", grace_s=1.0)
        with client.watch_decisions() as watching:
            watching.wait_started()
    methods = {"Generate", "Status", "CacheProbe", "Route", "ListBackends", "DrainBackend", "WatchDecisions"}
    assert guarded.headers.seen == {method: [f"Bearer {TOKEN}"] for method in methods}


async def test_the_client_for_asyncio(guarded: Guarded):
    async with AsyncClient(guarded.target, tls=guarded.tls, token=TOKEN) as client:
        assert (await client.complete("echo a b")).text == "a b"
        await client.status()
        await client.drain("fast", grace_s=1.0)
        async with client.watch_decisions() as watching:
            await watching.wait_started()
    assert guarded.headers.seen == {
        method: [f"Bearer {TOKEN}"] for method in ("Generate", "Status", "DrainBackend", "WatchDecisions")
    }


def test_who_does_not_show_a_certificate_or_believes_somebody_else_gets_nowhere(guarded: Guarded, tmp_path: Path):
    stranger = Authority(tmp_path / "stranger")
    for tls in (False, True, Tls(guarded.ca), Tls(stranger.ca, guarded.own.cert, guarded.own.key)):
        with Client(guarded.target, tls=tls) as client, pytest.raises(PhaserouteError) as caught:
            client.status()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("token", ["", "with space", "two\nlines", "ünicode"])
def test_what_is_no_token_is_refused_and_not_repeated(token: str):
    with pytest.raises(ValueError, match="no token has") as caught:
        Client("localhost:1", token=token)
    assert not token or token not in str(caught.value)


def test_the_command_takes_files_and_environment(phaseroute, guarded: Guarded, tmp_path: Path, monkeypatch):
    held = tmp_path / "token"
    held.write_text(f"{TOKEN}\n")
    assert phaseroute("generate", "echo a", *guarded.flags, "--token-file", str(held)).stdout == "a\n"
    monkeypatch.setenv("PHASEROUTE_TOKEN", "phr_from-environment")
    assert phaseroute("backends", "--json", *guarded.flags).exit_code == 0
    for name, flag in zip(("CA", "CERT", "KEY"), guarded.flags[1::2], strict=True):
        monkeypatch.setenv(f"PHASEROUTE_TLS_{name}", flag)
    assert phaseroute("route", "echo a", "--json").exit_code == 0
    assert guarded.headers.seen["Generate"] == [f"Bearer {TOKEN}"]
    assert guarded.headers.seen["ListBackends"] == guarded.headers.seen["Route"] == ["Bearer phr_from-environment"]


def test_the_command_says_what_cannot_be_used(phaseroute, guarded: Guarded, tmp_path: Path, monkeypatch):
    bad = tmp_path / "bad"
    bad.write_text("two words")
    for flags, words in (
        (["--tls-ca", str(tmp_path / "missing")], "No such file"),
        ([*guarded.flags[:4]], "go together"),
        (["--token-file", str(bad)], "no token has"),
        (["--token-file", str(tmp_path / "missing")], "No such file"),
    ):
        result = phaseroute("backends", *flags)
        assert (result.exit_code, words in result.stderr) == (2, True)
        assert "two words" not in result.stderr
    # Nor is a token in any help.
    monkeypatch.setenv("PHASEROUTE_TOKEN", TOKEN)
    for command in ("generate", "route", "backends", "bench"):
        assert TOKEN not in phaseroute(command, "--help").stdout


def test_a_new_token_is_shown_once_and_its_entry_is_its_hash(phaseroute):
    result = phaseroute("token", "new", "alice")
    token, _, entry = result.stdout.partition("\n")
    assert token.startswith("phr_")
    assert token not in entry
    assert f'[clients."alice"]\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"' in entry
    assert phaseroute("token", "new", "alice").stdout.partition("\n")[0] != token


def test_a_new_token_goes_into_files(phaseroute, tmp_path: Path):
    tokens, own = tmp_path / "tokens.toml", tmp_path / "alice.token"
    to = ("--into", str(tokens))
    options = ("--weight", "2", "--max-in-flight", "3", "--tokens-per-minute", "9", "--share-cache")
    scopes = ("--scopes", "generate,status")
    assert phaseroute("token", "new", "alice", *scopes, *options, *to, "--out", str(own)).stdout == ""
    assert phaseroute("token", "new", "bob", *to).exit_code == 0
    alice, bob = load_tokens(tokens)
    assert hashlib.sha256(own.read_text().strip().encode()).digest() == alice.digest
    assert (alice.caller.name, alice.caller.scopes) == ("alice", {Scope.GENERATE, Scope.STATUS})
    assert (alice.caller.weight, alice.caller.max_in_flight, alice.caller.tokens_per_minute) == (2.0, 3, 9)
    assert (alice.caller.cache_salt, bob.caller.cache_salt != "") == ("", True)
    assert {own.stat().st_mode & 0o777, tokens.stat().st_mode & 0o777} == {0o600}

    before = tokens.read_text()
    for arguments in (
        ["bob", *to],
        ["carol", *to, "--out", str(own)],
        ["c d", *to],
        ["dave", "--scopes", "everything", *to],
        ["eve", "--weight", "0", *to],
    ):
        assert phaseroute("token", "new", *arguments).exit_code == 2
    assert tokens.read_text() == before
