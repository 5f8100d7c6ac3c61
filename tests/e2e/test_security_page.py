"""Every command of docs/security.md, as written there, with processes of their own."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from phaseroute.local.plan import free_ports
from service_kit.tokens import load_tokens
from tests.e2e.processes import Service, started

PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text()
BIN = Path(sys.executable).parent
MODULES = {"phaseroute-backend": "backend_service", "phaseroute-router": "router_service"}

pytestmark = pytest.mark.timeout(120)


def block(title: str, language: str = "sh") -> str:
    """The block that begins with this comment, or the first of its language."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return next(each for each in blocks if each.startswith(title))


def bash(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{BIN}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


async def together(commands: list[str], folder: Path) -> list[subprocess.CompletedProcess[str]]:
    return list(await asyncio.gather(*(asyncio.to_thread(bash, command, folder) for command in commands)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With certificates and tokens made as the page says."""
    made = tmp_path_factory.mktemp("security")
    for title in ("# certificates", "# tokens"):
        result = bash(block(title), made)
        assert result.returncode == 0, result.stderr
    return made


@pytest.fixture(scope="module")
def ports() -> dict[str, str]:
    """What the page's addresses are replaced by."""
    return dict(zip((":50051", ":50061"), (f":{port}" for port in free_ports(2)), strict=True))


def replaced(text: str, ports: dict[str, str]) -> str:
    for old, new in ports.items():
        text = text.replace(old, new)
    return text


@pytest.fixture
async def services(
    folder: Path, ports: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[Service]]:
    monkeypatch.chdir(folder)
    lines = replaced(block("# services"), ports).splitlines()[1:]
    (backend, *backend_flags), (router, *router_flags) = (line.split() for line in lines)
    logs = ("--log-format", "json", "--log-level", "debug")
    async with (
        started(MODULES[backend], *backend_flags, "--engine", "simulated", *logs) as first,
        started(MODULES[router], *router_flags, *logs) as second,
    ):
        await first.wait_line('"serving"')
        await second.wait_line('"state": "serving"')
        yield [first, second]


async def test_it_works_as_written(services: list[Service], folder: Path, ports: dict[str, str]):
    commands = replaced(block("# clients"), ports).splitlines()[1:]
    assert len(commands) == 4
    for command, result in zip(commands, await together(commands, folder), strict=True):
        assert result.returncode == 0, (command, result.stdout, result.stderr)
    script = replaced(block("from phaseroute", "python"), ports)
    result = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")

    # And nothing works without what the page says that it needs.
    generate = next(command for command in commands if " generate " in command)
    listing = next(command for command in commands if " backends " in command)
    at_backend = generate.replace(ports[":50051"], ports[":50061"]).replace("alice.token", "router.token")
    shown = "--tls-cert router.pem --tls-key router.key"
    refused = [
        (generate.replace(" --tls-ca ca.pem", ""), "No connection"),
        (generate.replace(" --token-file alice.token", ""), "asks for a token"),
        (generate.replace("alice.token", "router.token"), "not known here"),
        (listing.replace("ops.token", "alice.token"), 'the scope "status"'),
        (at_backend, "No connection"),
        (f"{at_backend.replace('router.token', 'alice.token')} {shown}", "not known here"),
    ]
    results = await together([command for command, _ in refused], folder)
    for (command, words), result in zip(refused, results, strict=True):
        assert (result.returncode, words in result.stderr) == (1, True), (command, result.stderr)
    assert (await asyncio.to_thread(bash, f"{at_backend} {shown}", folder)).returncode == 0

    secrets = [(folder / f"{name}.token").read_text().strip() for name in ("router", "alice", "ops")]
    for service in services:
        assert await service.end() == 0
        assert not [line for line in service.log for secret in secrets if secret in line]


def test_the_token_file_shown_is_one(tmp_path: Path):
    path = tmp_path / "tokens.toml"
    path.write_text(block("salt_secret", "toml"))
    [alice] = load_tokens(path)
    assert (alice.caller.name, alice.caller.weight, alice.caller.max_in_flight) == ("alice", 2.0, 8)
