"""The `phaseroute` command against the fake service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from phaseroute.cli import tables
from phaseroute.cli.app import app
from phaseroute.v1 import inference_pb2
from tests.clients.fake_service import FakeService


@pytest.fixture
def phaseroute(target: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PHASEROUTE_TARGET", target)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, arguments, input=stdin)

    return run


def test_generate_prints_the_text_and_nothing_else(phaseroute):
    result = phaseroute("generate", "echo hello [red]world")
    assert (result.exit_code, result.stdout) == (0, "hello [red]world\n")


def test_generate_sends_what_was_asked_for(phaseroute, service: FakeService):
    flags = (
        "--max-new-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --seed 9 --repetition-penalty 1.5 "
        "--frequency-penalty 0.25 --presence-penalty 0.75 --stop A --stop B --ignore-eos --workload w "
        "--priority batch "
        "--policy two_phase --backend fast --precision bf16"
    )
    assert phaseroute("generate", "echo a", *flags.split()).exit_code == 0
    sent = service.requests[-1]
    sampling = {field.name: round(value, 3) for field, value in sent.sampling.ListFields()}
    assert sampling == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 9, "repetition_penalty": 1.5,
        "frequency_penalty": 0.25, "presence_penalty": 0.75,
    }  # fmt: skip
    assert (sent.max_new_tokens, list(sent.stop), sent.ignore_eos, sent.workload) == (7, ["A", "B"], True, "w")
    assert sent.routing == inference_pb2.RoutingHints(policy="two_phase", backend="fast", precision="bf16")
    assert sent.priority == inference_pb2.PRIORITY_BATCH


def test_what_was_not_asked_for_stays_unset(phaseroute, service: FakeService):
    phaseroute("generate", "echo a")
    assert {field.name for field, _ in service.requests[-1].ListFields()} == {"prompt"}


def test_chat_is_a_user_message(phaseroute, service: FakeService):
    phaseroute("generate", "--chat", "Hi")
    assert [(turn.role, turn.content) for turn in service.requests[-1].prompt.chat.messages] == [("user", "Hi")]


def test_a_dash_reads_the_prompt_from_standard_input(phaseroute):
    assert phaseroute("generate", "-", stdin="echo from a pipe").stdout == "from a pipe\n"


def test_explain_shows_the_table_then_the_outcome(phaseroute):
    out = phaseroute("generate", "echo a b", "--explain").stdout
    text, table, reason, outcome = (out.index(part) for part in ("a b\n", "chosen", "lowest score", "predicted"))
    assert text < table < reason < outcome
    assert "3.444" in out
    assert "496 of them reused" in out


def test_json_is_one_object_with_the_decision(phaseroute):
    answer = json.loads(phaseroute("generate", "echo a b", "--json", "--explain").stdout)
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("a b", [10, 11], "length")
    assert answer["decision"]["id"] == answer["routing"]["decision_id"]
    assert answer["decision"]["candidates"][0]["score_s"] == 3.444


def test_route_explains_and_sends_nothing(phaseroute, service: FakeService):
    result = phaseroute(
        "route", "echo a", "--max-new-tokens", "128", "--policy", "two_phase", "--precision", "q4_1 as f32"
    )
    assert result.exit_code == 0
    assert "3.118" in result.stdout
    assert [request.max_new_tokens for request in service.requests] == [128]
    assert service.requests[0].routing.precision == "q4_1 as f32"


def test_names_between_colons_stay_names(phaseroute, monkeypatch: pytest.MonkeyPatch):
    """Rich makes animals of some."""
    monkeypatch.setattr(tables, "decision_text", lambda _decision: "forced:llama: as asked for")
    assert "forced:llama: as asked for" in phaseroute("route", "echo a").stdout


def test_backends_as_table_and_as_json(phaseroute):
    assert "small unreachable: connection refused" in phaseroute("backends").stdout
    assert [entry["name"] for entry in json.loads(phaseroute("backends", "--json").stdout)] == ["fast", "small"]


@pytest.mark.parametrize(
    ("prompt", "says"), [("refuse", "choose a value in (0, 1]"), ("busy", "try again in 1.5 s"), ("crash", "INTERNAL")]
)
def test_a_refusal_is_one_line_and_exit_code_1(phaseroute, prompt: str, says: str):
    result = phaseroute("generate", prompt)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


def test_a_broken_stream_keeps_what_came(phaseroute):
    result = phaseroute("generate", "break")
    assert (result.exit_code, result.stdout) == (1, "partial\n")


def test_nobody_there_says_how_to_start_one(phaseroute):
    result = phaseroute("backends", "--target", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "`phaseroute up`" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["generate"], ["generate", "x", "--top-p", "much"], ["up", "extra"]]
)
def test_bad_usage_is_exit_code_2(phaseroute, arguments: list[str]):
    assert phaseroute(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["generate", "route", "backends", "up", "demo"])
def test_every_command_has_help(phaseroute, command: str):
    result = phaseroute(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_ctrl_c_is_quiet_and_cancels_the_call(target: str, service: FakeService):
    command = [sys.executable, "-m", "phaseroute.cli", "generate", "hang", "--target", target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(len("waiting")) == "waiting"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")
    assert service.ended.wait(10)
