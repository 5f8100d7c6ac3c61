"""Two engines behind one router, as whole processes: the demo and the benchmark."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.e2e.command import PHASEROUTE, assert_gone, call, running, tagged

ROOT = Path(__file__).parents[2]
SMALL = ("demo", "--mixed", "--requests", "2", "--prompt-tokens", "120", "--max-new-tokens", "16")
NAMES = ("sim-decode", "sim-prefill")
POLICIES = ("forced:sim-decode", "forced:sim-prefill", "round_robin", "two_phase", "predictive")


@pytest.fixture(autouse=True)
def _logs_go_with_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def left_over(monkeypatch: pytest.MonkeyPatch):
    """Tells which processes the test's commands left behind."""
    tag = uuid.uuid4().hex
    monkeypatch.setenv("PHASEROUTE_TEST", tag)
    return lambda: tagged("PHASEROUTE_TEST", tag)


def workload_sections(out: str) -> dict[str, str]:
    """What was said about each workload."""
    names = re.findall(r"^Workload (\w+): (?:\d+) request", out, re.MULTILINE)
    parts = re.split(r"^Workload .*$|^In short.*$", out, flags=re.MULTILINE)
    return dict(zip(names, parts[1:], strict=False))


class TestDemo:
    def test_it_shows_every_workload_under_every_policy_and_leaves_nothing(self, left_over, tmp_path: Path):
        demo = call(*SMALL, "--simulated")
        assert demo.returncode == 0, demo.stderr
        assert not demo.stderr
        assert not left_over()
        assert not list(tmp_path.glob("phaseroute-*"))
        sections = workload_sections(demo.stdout)
        assert list(sections) == ["warm", "cold", "long"]
        for text in sections.values():
            rows = re.findall(
                r"^ +(\S+) +(sim-\w+) (\d) +(?:\d[\d.]+|-) .* (\d\.\d{2,3}|\d\d\.\d) *$", text, re.MULTILINE
            )
            assert [row[0] for row in rows] == list(POLICIES)
            assert [row[1] for row in rows[:2]] == list(NAMES)
        assert demo.stdout.count("(SIMULATED)") == 4
        assert "predictive sent" in " ".join(demo.stdout.split())
        assert "\x1b" not in demo.stdout

    def test_interrupted_it_stops_quietly_and_leaves_nothing(self, tmp_path: Path):
        with running("demo", "--mixed", "--simulated") as demo:
            demo.read_until("forced:sim-decode")
            started = demo.descendants()
            assert len(started) == 3
            assert demo.end(signal.SIGINT) == 130
            assert "Traceback" not in demo.output
            assert_gone(started)
        assert not list(tmp_path.glob("phaseroute-*"))

    def test_runs_are_for_the_mixed_demo(self):
        demo = call("demo", "--simulated", "--runs", "2")
        assert demo.returncode == 2
        assert "needs --mixed" in demo.stderr

    def test_an_engine_that_cannot_start_is_named_with_the_remedy(self, tmp_path: Path, left_over):
        for module in ("mlx", "llama_cpp"):  # either may be the first to end
            (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('no such engine here', name='{module}')")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        demo = subprocess.run([*PHASEROUTE, *SMALL], env=environment, capture_output=True, text=True, timeout=60)
        assert demo.returncode == 1
        assert re.search(r"(llama|mlx) stopped .*not (fully )?installed.*pip install", demo.stderr), demo.stderr
        assert not left_over()

    @pytest.mark.timeout(300)
    def test_it_runs_with_both_engines(self, left_over):
        pytest.importorskip("mlx.core", exc_type=ImportError)
        arguments = ("demo", "--mixed", "--requests", "2", "--prompt-tokens", "60", "--max-new-tokens", "8")
        demo = subprocess.run([*PHASEROUTE, *arguments], capture_output=True, text=True, timeout=240)
        assert demo.returncode == 0, demo.stderr
        assert "SIMULATED" not in demo.stdout
        assert (
            re.findall(r"^ +(forced:\w+) +(\w+) [12] ", demo.stdout, re.MULTILINE)
            == [
                ("forced:llama", "llama"),
                ("forced:mlx", "mlx"),
            ]
            * 3
        )
        assert not left_over()


class TestBenchmark:
    def test_its_last_line_has_every_figure_and_its_file_every_request(self, tmp_path: Path, left_over):
        engine = "--engine simulated --simulated-prefill-rate"
        command = [
            sys.executable, "-m", "benchmarks.mixed_burst",
            "--backend", f"a={engine} 20000 --simulated-decode-ms 1:1,4:2 --max-active 3",
            "--backend", f"b={engine} 5000 --simulated-decode-ms 1:2",
            "--workloads", "warm", "cold", "--requests", "2", "3", "--runs", "2", "--new-tokens", "32",
            "--policies", "forced:a", "forced:b", "two_phase", "--sweep", "a=1,3", "--out", str(tmp_path / "out"),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": ".:protos:clients/python"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert not left_over()
        titles = [line for line in done.stdout.splitlines() if line.endswith("(SIMULATED)")]
        assert len(titles) == 6
        summary = json.loads(done.stdout.splitlines()[-1])
        assert (summary["benchmark"], summary["simulated"], summary["complete"]) == ("mixed_burst", True, True)
        assert {name: each["max_active"] for name, each in summary["backends"].items()} == {"a": 3, "b": 4}
        rows = {(row["workload"], row["requests"], row["policy"]): row for row in summary["rows"]}
        assert len(rows) == len(summary["rows"]) == 12
        for (_, requests, policy), row in rows.items():
            assert sum(counts[0] for counts in row["sent"].values()) == requests
            assert row["completion_s"]["low"] <= row["completion_s"]["median"] <= row["completion_s"]["high"]
            assert row["ttft_p50_s"]["median"] <= row["ttft_p95_s"]["median"]
            assert row["inter_token_p50_s"]["median"] > 0
            assert row["ratio"]["low"] >= 1 or policy == "two_phase"
        assert [(row["requests"], row["tokens_per_s"]["median"] > 0) for row in summary["sweep"]] == [
            (1, True),
            (3, True),
        ]
        kept = json.loads((tmp_path / "out/mixed_burst.json").read_text())
        assert {name: value for name, value in kept.items() if name != "bursts"} == summary
        assert len(kept["bursts"]) == 24
        for burst in kept["bursts"]:
            worst = burst["requests"][burst["ttft_p95_request"] - 1]
            assert worst["ttft_s"] == max(request["ttft_s"] for request in burst["requests"])
            assert worst["routing"]["backend"] == worst["backend"]
            assert worst["routing"]["predicted_ttft_s"] > 0
            assert worst["cached_tokens"] == 0 or burst["workload"] == "warm" or worst["cached_tokens"] < 10

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--backend", "gpu"], 'is not NAME="FLAGS"'),
            (["--sweep", "tpu=1"], "names no backend; there are llama, mlx"),
            (["--sweep", "llama=1,x"], "write the numbers of requests"),
            (["--workloads"], "nothing to do"),
            (["--runs", "0"], "--runs must be 1 or more"),
        ],
    )
    def test_what_it_cannot_do_is_said_before_anything_starts(self, arguments: list[str], says: str):
        command = [sys.executable, "-m", "benchmarks.mixed_burst", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert says in done.stderr
