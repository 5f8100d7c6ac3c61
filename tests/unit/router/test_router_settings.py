from __future__ import annotations

import pytest

from router_service.settings import RouterSettings
from service_kit.faults import StartupFailed


def refusal(*argv: str) -> str:
    with pytest.raises(StartupFailed) as raised:
        RouterSettings.load(argv)
    message = str(raised.value)
    assert message.count("\n") == 0
    return message


def test_backends_from_flags():
    settings = RouterSettings.load(["--backend", "cpu=127.0.0.1:1", "--backend", "gpu=dns:///gpu.local:2"])

    assert settings.targets == {"cpu": "127.0.0.1:1", "gpu": "dns:///gpu.local:2"}
    assert (settings.policy, settings.probe_timeout_s) == ("predictive", 0.05)


def test_backends_from_the_environment(monkeypatch):
    monkeypatch.setenv("PHASEROUTE_ROUTER_BACKEND", "cpu=127.0.0.1:1,gpu=[::1]:2")
    monkeypatch.setenv("PHASEROUTE_ROUTER_PROBE_TIMEOUT_S", "0.2")

    settings = RouterSettings.load([])

    assert settings.targets == {"cpu": "127.0.0.1:1", "gpu": "[::1]:2"}
    assert settings.probe_timeout_s == 0.2


def test_backends_from_a_file(tmp_path):
    file = tmp_path / "router.toml"
    file.write_text('backend = ["cpu=unix:/run/cpu.sock"]\npolicy = "forced:cpu"\n')

    settings = RouterSettings.load(["--config", str(file)])

    assert settings.targets == {"cpu": "unix:/run/cpu.sock"}
    assert settings.policy == "forced:cpu"


def test_no_backend():
    assert "--backend is required" in refusal()


@pytest.mark.parametrize(
    "item", ["cpu", "=127.0.0.1:1", "cpu=", "cpu=localhost", "cpu=127.0.0.1:x", "c p=127.0.0.1:1", "a/b=127.0.0.1:1"]
)
def test_malformed_backend(item):
    assert "is not name=target" in refusal("--backend", item)


def test_duplicate_names():
    assert "cpu is there more than once" in refusal("--backend", "cpu=127.0.0.1:1", "--backend", "cpu=127.0.0.1:2")


def test_unknown_policies():
    assert "use one of" in refusal("--backend", "cpu=127.0.0.1:1", "--policy", "fastest")
    assert "there are cpu" in refusal("--backend", "cpu=127.0.0.1:1", "--policy", "forced:gpu")


def test_breakers_and_bounds():
    settings = RouterSettings.load(
        ["--backend", "cpu=127.0.0.1:1", "--breaker-failures", "5", "--breaker-open-s", "60", "--max-in-flight", "7"]
    )
    assert (settings.breaker.failures, settings.breaker.open_s, settings.breaker.max_open_s) == (5, 60.0, 60.0)
    assert (settings.max_in_flight, settings.max_in_flight_tokens) == (7, 0)
    assert (settings.max_attempts, settings.max_replayed_tokens) == (4, 8192)


@pytest.mark.parametrize("flag", ["--breaker-failures", "--max-in-flight", "--max-attempts"])
def test_counts_are_above_zero(flag):
    assert flag in refusal("--backend", "cpu=127.0.0.1:1", flag, "0")


@pytest.mark.parametrize(
    "flag", ["--probe-timeout-s", "--status-poll-s", "--status-silence-s", "--stall-s", "--breaker-open-s"]
)
def test_times_are_above_zero(flag):
    assert flag in refusal("--backend", "cpu=127.0.0.1:1", flag, "0")
