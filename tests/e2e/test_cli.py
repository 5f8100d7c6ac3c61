"""The command against real services with simulated engines."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from phaseroute.local.plan import free_ports
from tests.e2e.command import SIMULATED_PAIR, Running, assert_gone, call, running, tagged

SHORT_DEMO = ("demo", "--simulated", "--requests", "3", "--prompt-tokens", "90", "--max-new-tokens", "8")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "phaseroute.toml"
    path.write_text(SIMULATED_PAIR)
    return path


@pytest.fixture(autouse=True)
def _logs_go_with_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


class TestUp:
    def test_generate_route_and_backends_work_against_it(self, stack: Running):
        answer = call("generate", "Hello", "--max-new-tokens", "8", "--explain", "--target", stack.target)
        assert answer.returncode == 0, answer.stderr
        assert re.search(r"fast +0 \+0 +5 +8 +0 +0\.0\d\d +0\.0\d\d +yes", answer.stdout), answer.stdout
        routed = json.loads(call("route", "Hello", "--json", "--target", stack.target).stdout)
        assert routed["selected"] == "fast"
        listed = json.loads(call("backends", "--json", "--target", stack.target).stdout)
        assert {entry["name"]: entry["state"] for entry in listed} == {
            "fast": "BACKEND_STATE_SERVING",
            "small": "BACKEND_STATE_SERVING",
        }
        assert all(entry["status"]["engine"]["simulated"] for entry in listed)

    def test_a_pinned_backend_is_used(self, stack: Running):
        pinned = ("generate", "Hello", "--max-new-tokens", "4", "--backend", "small", "--json", "--explain")
        answer = json.loads(call(*pinned, "--target", stack.target).stdout)
        assert (answer["routing"]["backend"], answer["decision"]["selected"]) == ("small", "small")

    def test_the_servers_sentence_reaches_the_terminal(self, stack: Running):
        answer = call("generate", "Hello", "--backend", "nobody", "--target", stack.target)
        assert (answer.returncode, answer.stdout) == (1, "")
        assert "nobody" in answer.stderr
        assert "fast" in answer.stderr

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_a_signal_stops_everything_cleanly(self, config: Path, number: signal.Signals):
        with running("up", "--config", str(config), "--port", str(free_ports(1)[0])) as up:
            up.read_until("Ready")
            started = up.descendants()
            assert len(started) == 3
            assert up.end(number) == 0
            assert "Stopped." in up.output
            assert_gone(started)

    def test_a_first_signal_lets_answers_finish_and_a_second_cuts_them_off(self, config: Path):
        config.write_text(SIMULATED_PAIR.replace('"1:1,4:3"', '"1:1000"').replace('"1:4,4:8"', '"1:1000"'))
        with running("up", "--config", str(config), "--port", str(free_ports(1)[0])) as up:
            up.read_until("Ready")
            started = up.descendants()
            with running("generate", "Hi", "--target", up.target, "--ignore-eos") as generate:
                assert generate.process.stdout is not None
                generate.process.stdout.read(1)
                up.process.send_signal(signal.SIGINT)
                up.read_until("router: stopping")
                generate.process.stdout.read(1)
                assert up.end(signal.SIGINT) == 0
                assert generate.process.wait(20) == 1
            assert_gone(started)

    @pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
    def test_killed_outright_it_leaves_nothing_behind(self, config: Path):
        with running("up", "--config", str(config), "--port", str(free_ports(1)[0])) as up:
            up.read_until("Ready")
            started = up.descendants()
            assert up.end(signal.SIGKILL) == -signal.SIGKILL
            assert_gone(started)

    def test_a_backend_that_cannot_start_stops_everything_and_is_named(self, config: Path, tmp_path: Path):
        config.write_text(SIMULATED_PAIR.replace('"1:4,4:8"', '"fast, please"'))
        up = call("up", "--config", str(config), "--run-dir", str(tmp_path / "run"))
        assert up.returncode == 1
        assert "small stopped (exit code 2)" in up.stderr
        assert "fast, please" in up.stderr
        assert str(tmp_path / "run/small.log") in up.stderr
        assert up.stderr.count("\n") == 1

    def test_a_port_in_use_is_named(self, config: Path, stack: Running):
        up = call("up", "--config", str(config), "--port", stack.target.rpartition(":")[2])
        assert up.returncode == 1
        assert "port is in use" in up.stderr

    def test_a_backend_that_dies_later_is_told_and_the_other_goes_on(self, config: Path):
        with running("up", "--config", str(config), "--port", str(free_ports(1)[0])) as up:
            up.read_until("Ready")
            small = next(item for item in up.descendants() if "1:4,4:8" in item.cmdline())
            small.kill()
            up.read_until("The others go on.")
            assert call("generate", "Hi", "--max-new-tokens", "2", "--target", up.target).returncode == 0

    def test_a_bad_file_is_one_line(self, config: Path):
        config.write_text("[backends.fast")
        up = call("up", "--config", str(config))
        assert up.returncode == 1
        assert "not valid TOML" in up.stderr
        assert up.stderr.count("\n") == 1


class TestDemo:
    @pytest.fixture
    def left_over(self, monkeypatch: pytest.MonkeyPatch):
        """Tells which processes the test's commands left behind."""
        tag = uuid.uuid4().hex
        monkeypatch.setenv("PHASEROUTE_TEST", tag)
        return lambda: tagged("PHASEROUTE_TEST", tag)

    def test_it_ends_by_itself_leaves_nothing_and_works_again_at_once(self, left_over):
        for _ in range(2):
            demo = call(*SHORT_DEMO)
            assert demo.returncode == 0, demo.stderr
            assert not demo.stderr
            assert not left_over()

    def test_it_shows_decisions_times_and_the_ratio_and_says_what_they_are(self):
        out = call(*SHORT_DEMO).stdout
        assert "SIMULATED" in out
        decided = re.findall(r"^ +([123]) +fast +\d+ \+\d+ +\d+ +\d+ +\d+ +\d+\.\d{3}", out, re.MULTILINE)
        assert decided == ["1", "2", "3"]
        measured = re.findall(r"^ +[123] +fast +\d+\.\d\d +\d+\.\d\d +(?:fast|small) +\d+\.\d\d", out, re.MULTILINE)
        assert len(measured) == 3
        assert "mixed / forced" in " ".join(out.split())
        assert "on this machine" in out
        assert "\x1b" not in out

    def test_interrupted_it_stops_quietly_and_leaves_nothing(self):
        with running(*SHORT_DEMO[:2], "--requests", "8") as demo:
            demo.read_until("forced to fast")
            started = demo.descendants()
            assert len(started) == 3
            assert demo.end(signal.SIGINT) == 130
            assert "Traceback" not in demo.output
            assert_gone(started)

    def test_its_reader_may_leave(self, left_over):
        script = f"{sys.executable} -m phaseroute.cli {' '.join(SHORT_DEMO)} | head -1"
        piped = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert piped.stdout.count("\n") == 1
        assert "Traceback" not in piped.stderr
        assert not left_over()

    def test_it_runs_with_the_real_model(self, left_over):
        demo = call("demo", "--requests", "3", "--prompt-tokens", "100", "--max-new-tokens", "8")
        assert demo.returncode == 0, demo.stderr
        assert "llama_cpp" in demo.stdout
        assert "SIMULATED" not in demo.stdout
        assert re.search(
            r"Completion of the burst: forced \d+\.\d\d s .* mixed \d+\.\d\d s", " ".join(demo.stdout.split())
        )
        assert not left_over()
