"""From flags to what a server is protected by."""

from pathlib import Path

import pytest
import structlog

from service_kit.calls import CallLimits
from service_kit.certificates import ClientTls, ServerTls
from service_kit.channels import ConnectionLimits
from service_kit.faults import StartupFailed
from service_kit.identity import Scope
from service_kit.peer_channel import PeerSecurity
from service_kit.peers import PeerSettings
from service_kit.protection import Protection
from tests.tokens import write_tokens


class Sample(PeerSettings, env_prefix="SAMPLE_", cli_prog_name="sample"):
    """Serves samples."""


def test_by_default_there_is_nothing_but_limits() -> None:
    settings = Sample.load([])
    assert settings.protection == Protection()
    assert not settings.peer_security


def test_flags_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLE_TOKENS", "/t.toml")
    flags = (
        "--tls-cert c --tls-key k --tls-client-ca ca --no-admin --no-reflection --max-message-mb 2 --max-calls 3 "
        "--max-observers 4 --max-connections 5 --max-streams 6 --idle-connection-s 7"
    )
    assert Sample.load(flags.split()).protection == Protection(
        tls=ServerTls(Path("c"), Path("k"), Path("ca")),
        token_file=Path("/t.toml"),
        admin=False,
        reflection=False,
        connections=ConnectionLimits(message_bytes=2 * 1024 * 1024, connections=5, streams=6, idle_s=7.0),
        calls=CallLimits(calls=3, observers=4),
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--backend-tls", PeerSecurity(ClientTls())),
        ("--backend-tls-ca ca", PeerSecurity(ClientTls(Path("ca")))),
        (
            "--backend-tls-ca ca --backend-tls-cert c --backend-tls-key k --backend-token-file t",
            PeerSecurity(ClientTls(Path("ca"), Path("c"), Path("k")), Path("t")),
        ),
        ("--backend-token-file t", PeerSecurity(None, Path("t"))),
    ],
)
def test_flags_for_backends_arrive(flags: str, expected: PeerSecurity) -> None:
    assert Sample.load(flags.split()).peer_security == expected


@pytest.mark.parametrize(
    "flags", ["--tls-cert c", "--tls-key k", "--tls-client-ca ca", "--backend-tls-cert c", "--backend-tls-key k"]
)
def test_half_a_pair_is_refused(flags: str) -> None:
    with pytest.raises(StartupFailed, match=r"go together|needs --tls-cert"):
        Sample.load(flags.split())


def test_risks_are_said_at_the_start(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "t", {"a": [Scope.GENERATE]})
    tls = ServerTls(tmp_path, tmp_path)
    mutual = ServerTls(tmp_path, tmp_path, tmp_path)
    for protection, address, words in (
        (Protection(), "0.0.0.0:1", "whoever reaches this address"),
        (Protection(tls=tls), "0.0.0.0:1", "whoever reaches this address"),
        (Protection(token_file=tokens), "0.0.0.0:1", "tokens come without TLS"),
        (Protection(token_file=tokens), "127.0.0.1:1", None),
        (Protection(), "unix:/a", None),
        (Protection(tls=mutual), "0.0.0.0:1", None),
        (Protection(tls=tls, token_file=tokens), "0.0.0.0:1", None),
    ):
        with structlog.testing.capture_logs() as logged:
            protection.access(address)
        assert [entry["log_level"] for entry in logged] == (["warning"] if words else [])
        assert words is None or words in logged[0]["event"]
