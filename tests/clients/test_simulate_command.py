"""`phaseroute simulate`, in this process. Everything that it shows is simulated."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import ClassVar

import pytest
import typer
from typer.testing import CliRunner, Result

from phaseroute.cli.app import app
from phaseroute.scenarios.presets import PRESETS, build
from phaseroute.scenarios.trace import COLUMNS, read_trace
from phaseroute.v1 import router_pb2
from simulator.devices import FLEETS, fleet
from simulator.profile_file import load_profiles
from tests.clients.fake_service import FakeService, serving


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ("simulate", *arguments))

    return run


def summary(result: Result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def figures(result: Result, name: str = "completion_s"):
    """By policy, mean over runs."""
    return {row["policy"]: row["figures"][name]["mean"] for row in summary(result)["rows"]}


def test_without_flags_it_plays_the_articles_bursts_and_says_that_they_are_simulated(simulate):
    result = simulate()
    told = summary(result)
    assert "SIMULATED" in result.stdout
    assert told["simulated"] is told["complete"] is True
    assert list(told["scenarios"]) == ["article8", "article48"]
    assert told["policies"] == ["forced:gpu", "two_phase", "predictive"]
    assert list(told["backends"]) == ["cpu", "gpu"]
    assert [row["requests"] for row in told["rows"]] == [8, 8, 8, 48, 48, 48]


def test_predictive_ends_the_articles_bursts_before_two_phase_and_that_before_the_gpu_alone(simulate):
    for name in ("article8", "article48"):
        ends_s = figures(simulate("--scenario", name))
        assert ends_s["predictive"] < ends_s["two_phase"] < ends_s["forced:gpu"]


def test_json_is_the_only_line_and_the_same_each_time(simulate):
    arguments = ("--json", "--scenario", "poisson", "--requests", "6", "--runs", "2", "--seed", "7")
    first, second = simulate(*arguments), simulate(*arguments)
    assert len(first.stdout.splitlines()) == 1
    assert summary(first)["rows"] == summary(second)["rows"]
    assert summary(first)["plays"] == 6


def test_what_happens_to_backends_is_played(simulate):
    result = simulate("--scenario", "article8", "--policy", "forced:gpu", "--fail", "gpu@1", "--return", "gpu@2")
    assert summary(result)["rows"][0]["codes"]["UNAVAILABLE"] >= 1
    quick, slow = (
        figures(simulate("--scenario", "article8", "--policy", "forced:gpu", *more))["forced:gpu"]
        for more in ((), ("--slow", "gpu@0:2"))
    )
    assert slow == pytest.approx(2 * quick, rel=0.05)


def test_a_batch_size_holds_for_every_backend(simulate):
    one, four = (
        figures(simulate("--scenario", "article8", "--policy", "forced:gpu", *more))["forced:gpu"]
        for more in (("--max-active", "1"), ())
    )
    assert one < 0.5 * four
    auto = figures(simulate("--scenario", "article8", "--policy", "forced:gpu", "--max-active", "auto"))["forced:gpu"]
    assert auto == pytest.approx(one, rel=0.2)


def test_estimates_of_lengths_change_what_is_predicted(simulate):
    biases = {
        lengths: figures(
            simulate("--scenario", "shorter", "--requests", "40", "--policy", "predictive", "--lengths", lengths),
            "finish_bias",
        )["predictive"]
        for lengths in ("budget", "history")
    }
    assert biases["history"] < biases["budget"]


def test_out_has_requests_figures_traces_and_plots(simulate, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    result = simulate("--scenario", "article8", "--policy", "predictive", "--out", str(out))
    with (out / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert {row["simulated"] for row in rows} == {"1"}
    assert json.loads((out / "summary.json").read_text()) == summary(result)
    assert read_trace(out / "traces" / "article8.csv").requests == build("article8").requests
    for plot in ("ttft", "predictive_timeline", "predictive_forecast", "predictive_crossover"):
        for kind in ("svg", "png"):
            assert (out / "plots" / f"article8_{plot}.{kind}").stat().st_size > 1000
    assert "SIMULATED" in (out / "plots" / "article8_predictive_crossover.svg").read_text()


def test_without_plots_there_are_none(simulate, tmp_path):
    out = tmp_path / "out"
    summary(simulate("--scenario", "article8", "--policy", "two_phase", "--no-plots", "--out", str(out)))
    assert not (out / "plots").exists()
    assert (out / "requests.csv").exists()


def test_backends_can_be_saved_and_played_again(simulate, tmp_path):
    path = str(tmp_path / "backends.json")
    played = ("--scenario", "article8", "--policy", "two_phase", "--json")
    saved = simulate(*played, "--fleet", "article3", "--save-profiles", path)
    assert load_profiles(tmp_path / "backends.json") == fleet("article3")
    assert summary(simulate(*played, "--profiles", path))["rows"] == summary(saved)["rows"]


class LiveRouter(FakeService):
    """Lists what it is told to."""

    entries: ClassVar[list[router_pb2.BackendEntry]] = []

    def ListBackends(self, request, context):
        return router_pb2.ListBackendsResponse(backends=self.entries)


def test_backends_can_be_like_those_of_a_router_that_runs(simulate, monkeypatch: pytest.MonkeyPatch):
    entry = router_pb2.BackendEntry(name="a", state=router_pb2.BACKEND_STATE_SERVING)
    status = entry.status
    status.max_active = 2
    status.kv_cache.capacity_tokens = 4096
    status.isolated_rates.prefill_tokens_per_s = 100
    status.isolated_rates.decode_tokens_per_s = 10
    status.step_model.base_s, status.step_model.per_token_s = 0.09, 0.01
    status.step_rules.step_tokens = 64
    gone = router_pb2.BackendEntry(name="gone", state=router_pb2.BACKEND_STATE_UNREACHABLE)
    monkeypatch.setattr(LiveRouter, "entries", [entry, gone])
    with serving(LiveRouter()) as target:
        result = simulate("--from-router", target, "--scenario", "article8", "--policy", "two_phase")
        assert list(summary(result)["backends"]) == ["a"]
        status.ClearField("step_model")
        refused = simulate("--from-router", target)
        assert refused.exit_code == 2
        assert "--from-router: backend a: its Status has no usable step model yet" in refused.stderr
        LiveRouter.entries.remove(entry)
        assert "no backend of" in simulate("--from-router", target).stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--scenario nope", "--scenario: 'nope' is no scenario; use one of article8,"),
        ("--fleet nope", "--fleet: 'nope' is no fleet; use one of article,"),
        ("--policy nope", "--policy: 'nope' is no policy; use one of"),
        ("--policy forced:tpu", "--policy: 'forced:tpu' names no backend here; there are cpu, gpu"),
        ("--lengths nope", "--lengths: 'nope' is no way to estimate them; use one of history,"),
        ("--runs 0", "--runs: is 0; give 1 to 1000"),
        ("--requests 0", "--requests: requests is 0; give 1 to 1000000"),
        ("--prompt-tokens 1", "--prompt-tokens: prompt_tokens is 1; give 2 to"),
        ("--arrivals poisson:rate=0", "--arrivals: arrivals 'poisson:rate=0': rate is 0; give a number from"),
        ("--max-active 0", "--max-active: is '0'; give auto, or 1 to 512"),
        ("--max-active many", "--max-active: is 'many'; give auto, or 1 to 512"),
        ("--fail tpu@3", "--fail: 'tpu@3': no backend is called 'tpu'; there are cpu, gpu"),
        ("--return gpu", "--return: 'gpu' does not say who and when; write it like gpu@12.5"),
        ("--slow gpu@3:0", "--slow: 'gpu@3:0': the factor is '0'; give 0.001 to 1000"),
        ("--profiles /nowhere.json", "--profiles: /nowhere.json cannot be read"),
        ("--save-profiles /no/where.json", "--save-profiles: /no/where.json cannot be written"),
        ("--fleet article --profiles x.json", "--profiles: the backends are given by --fleet already"),
    ],
)
def test_a_wrong_value_is_one_line_with_the_flag_and_what_is_allowed(simulate, arguments, says):
    result = simulate(*arguments.split())
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_results_that_are_there_are_not_written_over(simulate, tmp_path):
    (tmp_path / "summary.json").write_text("mine")
    result = simulate("--out", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--out: " in result.stderr
    assert (tmp_path / "summary.json").read_text() == "mine"


def test_ctrl_c_shows_what_was_played(simulate, monkeypatch):
    from phaseroute.cli import simulate_run

    real, plays = simulate_run.play, []

    def second_is_cut_off(*args, **kwargs):
        plays.append(args)
        if len(plays) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(simulate_run, "play", second_is_cut_off)
    result = simulate("--scenario", "article8")
    told = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 130
    assert (told["complete"], told["plays"], told["plays_planned"]) == (False, 1, 3)
    assert "forced:gpu 8" in result.stdout


def test_the_documentation_has_every_scenario_fleet_and_flag():
    text = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
    command = typer.main.get_command(app)
    flags = {max(option.opts, key=len) for option in command.commands["simulate"].params}
    for name in (*PRESETS, *FLEETS, *flags, *COLUMNS):
        assert f"`{name}" in text, f"{name} is missing"
