"""`phaseroute bench` as people use it, against services with simulated engines."""

from __future__ import annotations

import csv
import json
import signal
import uuid
from pathlib import Path

import pytest

from phaseroute.bench.requests_csv import COLUMNS
from phaseroute.local.plan import free_ports
from tests.e2e.command import SIMULATED_PAIR, Running, assert_gone, call, running, tagged

pytest.importorskip("phaseroute.scenarios.presets", exc_type=ImportError)

SHORT = ("bench", "--scenario", "article8", "--requests", "4", "--prompt-tokens", "80", "--new-tokens", "8")
"""Four requests 50 ms apart with a warm prefix."""


@pytest.fixture(autouse=True)
def _logs_go_with_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / "requests.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class TestBench:
    def test_policies_take_turns_and_everything_is_written(self, stack: Running, tmp_path: Path):
        policies = ("forced:small", "two_phase")
        chosen = (part for policy in policies for part in ("--policy", policy))
        done = call(*SHORT, "--target", stack.target, *chosen, "--runs", "2", "--out", str(tmp_path / "out"))
        assert (done.returncode, done.stderr) == (0, "")
        assert "SIMULATED" in done.stdout
        rows = lines(tmp_path / "out")
        assert tuple(rows[0]) == COLUMNS
        assert [(row["run"], row["policy"], row["index"]) for row in rows] == [
            (str(run), policy, str(index))
            for run, order in enumerate((policies, policies[::-1]))
            for policy in order
            for index in range(4)
        ]
        for row in rows:
            assert (row["code"], row["prompt_tokens"], row["new_tokens"], row["simulated"]) == ("OK", "80", "8", "1")
            assert int(row["cached_tokens"]) >= 60
            assert 0 < float(row["ttft_s"]) <= float(row["finish_s"])
            assert 0 < float(row["predicted_ttft_s"]) <= float(row["predicted_finish_s"])
            assert 0 <= float(row["inter_token_p50_s"]) <= float(row["inter_token_max_s"])
        assert {row["backend"] for row in rows if row["policy"] == "forced:small"} == {"small"}

        summary = json.loads(done.stdout.splitlines()[-1])
        assert summary == json.loads((tmp_path / "out/summary.json").read_text())
        assert (summary["complete"], summary["simulated"], summary["plays"]) == (True, True, 4)
        first, second = summary["rows"]
        assert [first["policy"], second["policy"]] == list(policies)
        assert second["ratios"]["completion_s"]["runs"] == 2
        assert len(first["figures"]["ttft_p95_s"]["ci95"]) == 2

        page = (tmp_path / "out/report.html").read_text()
        assert page.count("<svg") == 5
        assert "(SIMULATED)" in page
        assert (
            len(list((tmp_path / "out/plots").glob("*.png"))) == len(list((tmp_path / "out/plots").glob("*.svg"))) == 5
        )

    def test_a_backend_that_dies_meanwhile_leaves_codes_and_files(self, tmp_path: Path):
        config = tmp_path / "phaseroute.toml"
        config.write_text(SIMULATED_PAIR.replace('"1:4,4:8"', '"1:40,4:40"'))
        with running("up", "--config", str(config), "--port", str(free_ports(1)[0])) as up:
            up.read_until("Ready")
            small = next(item for item in up.descendants() if "1:40,4:40" in item.cmdline())
            options = ("--policy", "forced:fast", "--policy", "forced:small", "--runs", "1", "--new-tokens", "100")
            with running(*SHORT, *options, "--target", up.target, "--out", str(tmp_path / "out")) as bench:
                bench.read_until("forced:fast: ")  # the next play is on `small`, for 4 s
                small.kill()
                assert bench.process.wait(60) == 0
                bench.output += bench.process.stdout.read()
        rows = {policy: [row for row in lines(tmp_path / "out") if row["policy"] == policy] for policy in
                ("forced:fast", "forced:small")}  # fmt: skip
        assert {row["code"] for row in rows["forced:fast"]} == {"OK"}
        assert {row["code"] for row in rows["forced:small"]} <= {"UNAVAILABLE", "FAILED_PRECONDITION"}
        assert len(rows["forced:small"]) == 4
        assert all(row["finish_s"] == row["backend"] == "" for row in rows["forced:small"])
        summary = json.loads(bench.output.splitlines()[-1])
        assert summary["rows"][1]["figures"]["failed_share"]["mean"] == 1.0
        assert any("forced:small, run 1: 4 ended with" in note for note in summary["notes"])
        assert "4 lost" in (tmp_path / "out/report.html").read_text()

    def test_interrupted_it_keeps_what_was_measured(self, stack: Running, tmp_path: Path):
        options = ("--policy", "two_phase", "--runs", "50", "--target", stack.target, "--out", str(tmp_path / "out"))
        with running(*SHORT, *options) as bench:
            bench.read_until("two_phase, run 2: ")
            assert bench.end(signal.SIGINT) == 130
        assert "Traceback" not in bench.output
        summary = json.loads(bench.output.splitlines()[-1])
        assert (summary["complete"], summary["plays_planned"]) == (False, 50)
        assert 2 <= summary["plays"] < 50
        assert {row["run"] for row in lines(tmp_path / "out")} >= {"0", "1"}
        assert "Incomplete" in (tmp_path / "out/report.html").read_text()

    def test_a_router_that_is_gone_ends_it_and_what_there_is_stays(self, tmp_path: Path):
        config = tmp_path / "phaseroute.toml"
        config.write_text(SIMULATED_PAIR)
        with running("up", "--config", str(config), "--port", str(free_ports(1)[0])) as up:
            up.read_until("Ready")
            options = ("--policy", "two_phase", "--runs", "200", "--target", up.target, "--out", str(tmp_path / "out"))
            with running(*SHORT, *options) as bench:
                bench.read_until("two_phase, run 1: ")
                up.end(signal.SIGKILL)
                assert bench.process.wait(60) == 1
                bench.output += bench.process.stdout.read()
        assert "Traceback" not in bench.output
        assert "No connection to" in bench.output
        assert lines(tmp_path / "out")[0]["code"] == "OK"
        assert json.loads((tmp_path / "out/summary.json").read_text())["complete"] is False

    def test_a_single_backend_is_measured_without_a_router(self, stack: Running):
        listed = json.loads(call("backends", "--json", "--target", stack.target).stdout)
        done = call(*SHORT, "--runs", "1", "--target", listed[0]["target"])
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout.splitlines()[-1])
        assert [row["policy"] for row in summary["rows"]] == ["direct"]

    def test_it_starts_a_fleet_and_leaves_nothing_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        tag = uuid.uuid4().hex
        monkeypatch.setenv("PHASEROUTE_TEST", tag)
        done = call(*SHORT, "--local", "simulated", "--policy", "two_phase", "--runs", "1")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["complete"] is True
        assert not tagged("PHASEROUTE_TEST", tag)
        assert not list(tmp_path.glob("phaseroute-*"))

    def test_interrupted_it_stops_the_fleet(self):
        with running(*SHORT, "--local", "simulated", "--policy", "two_phase", "--runs", "50") as bench:
            bench.read_until("run 1: ")
            started = bench.descendants()
            assert len(started) == 3
            assert bench.end(signal.SIGINT) == 130
            assert_gone(started)

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--scenario", "article9"], "article8"),
            (["--local", "simulated", "--policy", "fastest"], "round_robin"),
            (["--local", "simulated", "--policy", "forced:gpu"], "sim-prefill"),
            (["--runs", "0"], "--runs"),
        ],
    )
    def test_what_it_cannot_do_is_said_before_anything_starts(self, arguments: list[str], says: str):
        done = call("bench", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr

    def test_a_policy_that_a_router_lacks_is_refused_before_anything_is_sent(self, stack: Running, tmp_path: Path):
        out = tmp_path / "out"
        done = call(*SHORT, "--target", stack.target, "--policy", "fastest", "--out", str(out))
        assert done.returncode == 2
        assert "two_phase" in done.stderr
        assert not list(out.glob("*"))

    def test_earlier_results_are_not_written_over(self, stack: Running, tmp_path: Path):
        (tmp_path / "summary.json").write_text("{}")
        done = call(*SHORT, "--target", stack.target, "--out", str(tmp_path))
        assert done.returncode == 2
        assert "choose another folder" in " ".join(done.stderr.replace("│", " ").split())

    def test_nobody_there_is_one_line(self, tmp_path: Path):
        done = call(*SHORT, "--target", f"127.0.0.1:{free_ports(1)[0]}")
        assert done.returncode == 1
        assert "No connection to" in done.stderr
        assert done.stderr.count("\n") == 1
