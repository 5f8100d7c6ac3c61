"""The compose file against the services' own settings: what it says must be what they take."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from backend_service.settings import BackendSettings
from router_service.settings import RouterSettings

ROOT = Path(__file__).parents[2]
SETTINGS = {"backend_service": BackendSettings, "router_service": RouterSettings}


def expand(text: str) -> str:
    """As compose does with `${NAME:-default}`, nothing set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


COMPOSE = yaml.safe_load(expand((ROOT / "compose/compose.yaml").read_text()))
DOCKERFILE = (ROOT / "compose/Dockerfile").read_text()


def settings_of(name: str):
    module, *flags = COMPOSE["services"][name]["command"]
    return SETTINGS[module].load(flags)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_flags_are_ones_the_service_takes(name: str):
    settings_of(name)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_health_is_asked_where_the_service_listens(name: str):
    program = COMPOSE["services"][name]["healthcheck"]["test"]
    assert program[:4] == ["CMD", "python", "-m", "service_kit.healthcheck"]
    asked = program[program.index("--addr") + 1]
    assert asked.rpartition(":")[2] == settings_of(name).listen.rpartition(":")[2]


def test_the_router_waits_for_every_backend_and_knows_its_address():
    targets = settings_of("router").targets
    assert targets.keys() == COMPOSE["services"].keys() - {"router"}
    for name, target in targets.items():
        assert target == f"{name}:{settings_of(name).listen.rpartition(':')[2]}"
        assert COMPOSE["services"]["router"]["depends_on"][name] == {"condition": "service_healthy"}


def test_backends_are_unequal_and_pinned_to_enough_cores():
    fast, small = settings_of("fast"), settings_of("small")
    assert (fast.threads, fast.kv_type) != (small.threads, small.kv_type)
    assert COMPOSE["services"]["fast"]["cpuset"] != COMPOSE["services"]["small"]["cpuset"]


def test_containers_outlive_a_drain():
    for name, service in COMPOSE["services"].items():
        grace_s = int(service["stop_grace_period"].removesuffix("s"))
        assert grace_s > settings_of(name).drain_grace_s


def test_only_this_machine_reaches_the_router():
    assert all(port.startswith("127.0.0.1:") for port in COMPOSE["services"]["router"]["ports"])


def test_the_image_is_built_in_stages_and_runs_unprivileged():
    instructions = [line.split() for line in DOCKERFILE.splitlines() if line and line[0].isupper()]
    stages = [line for line in instructions if line[0] == "FROM"]
    last = instructions[instructions.index(stages[-1]) :]
    assert len(stages) == 2
    assert ["USER", "phaseroute"] in last
    assert last.index(["USER", "phaseroute"]) > max(i for i, line in enumerate(last) if line[0] in ("RUN", "COPY"))


def test_the_image_gets_everything_that_is_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {
        path.removesuffix("/phaseroute")
        for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    }
    copies = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY") and "--from" not in line
    ]
    copied = {path for sources in copies for path in sources}
    assert wanted <= copied
    assert {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]} <= copied
    assert all((ROOT / path).exists() for path in copied)
