import pytest
from rich.console import Console

from phaseroute.cli import tables
from phaseroute.results import Routing
from phaseroute.v1 import router_pb2
from tests.clients.fake_service import decision, status

COLUMNS = {
    "backend", "active", "+queued", "prefill", "to", "do", "decode", "budget", "prefix", "there", "finish", "score",
    "(s)", "chosen",
}  # fmt: skip


def text_of(renderable, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def cells_of(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(name))


@pytest.mark.parametrize("width", [80, 120])
def test_a_decision_has_every_column_and_fits(width: int):
    text = text_of(tables.decision_table(decision("d", "small")), width)
    heading = text.split("───")[0]
    assert "…" not in text
    assert set(heading.split()) == COLUMNS
    assert cells_of(text, "fast") == ["fast", "4", "+3", "80", "1000", "496", "-", "3.444"]
    assert cells_of(text, "small") == ["small", "0", "+0", "20", "128", "496", "-", "3.118", "yes"]
    assert cells_of(text, "old")[-1] == "out"


def test_numbered_decisions_fit_too():
    table = tables.candidate_table(labelled=True)
    tables.add_candidates(table, decision("d", "small"), "8")
    text = text_of(table)
    assert "…" not in text
    assert cells_of(text, "8") == ["8", "fast", "4", "+3", "80", "1000", "496", "-", "3.444"]


def test_what_the_table_cannot_say_is_said_below_it():
    made = decision("d", "small")
    made.candidates[0].probe = router_pb2.PROBE_OUTCOME_SKIPPED
    made.candidates[0].prompt_tokens_estimated = True
    made.candidates[1].probe = router_pb2.PROBE_OUTCOME_LATE
    made.candidates[1].ClearField("score_s")
    made.attempt = 2
    text = text_of(tables.decision_table(made))
    assert cells_of(text, "fast") == ["fast", "4", "+3", "~80", "1000", "-", "-", "3.444"]
    assert cells_of(text, "small") == ["small", "0", "+0", "20", "128", "-", "-", "-", "yes"]
    below = tables.decision_text(made)
    assert "attempt 2" in below
    assert "fast was not asked" in below
    assert "small did not say in time" in below
    assert "old is excluded: draining" in below


def test_backends_show_queue_cache_and_speed():
    entries = [
        router_pb2.BackendEntry(name="gpu", target="h:1", state=router_pb2.BACKEND_STATE_SERVING, status=status()),
        router_pb2.BackendEntry(name="cpu", target="h:2", state=router_pb2.BACKEND_STATE_CONNECTING, detail="refused"),
    ]
    text = text_of(tables.backend_table(entries))
    for part in (
        "gpu serving",
        "simulated",
        "1 of 4 active",
        "1 queued",
        "1024",
        "of 4096",
        "2551 prefill",
        "293 decode",
    ):
        assert part in text
    assert "cpu connecting" in text
    assert tables.backend_text(entries) == "cpu connecting: refused"


def entry(name: str, *, model: str = "m", precision: str = "q4_1", left_out: str = "") -> router_pb2.BackendEntry:
    heard = status()
    heard.engine.name, heard.engine.device, heard.engine.simulated = "llama_cpp", "CPU", False
    heard.model.name, heard.model.precision = model, precision
    return router_pb2.BackendEntry(
        name=name, target="h:1", state=router_pb2.BACKEND_STATE_SERVING, status=heard, left_out=left_out
    )


def test_backends_show_the_precision_beside_the_model():
    text = text_of(
        tables.backend_table([entry("cpu", precision="q4_1 as f32"), entry("old", model="older", precision="")])
    )
    assert "m, q4_1 as f32" in text
    assert "older" in text
    assert "older," not in text


def test_equal_backends_need_no_words():
    assert tables.backend_text([entry("one"), entry("two"), entry("three", model="n", precision="bf16")]) == ""


def test_backends_that_differ_are_told_below_the_table():
    entries = [
        entry("cpu", precision="q4_1 as f32"),
        entry("gpu", precision="bf16"),
        entry("old", precision=""),
        entry("odd", precision="f16", left_out="tokenizes differently"),
        entry("other", model="n", precision="f32"),
    ]
    assert tables.backend_text(entries).splitlines() == [
        "odd is left out: tokenizes differently",
        "m is held differently: cpu in q4_1 as f32, gpu in bf16, old in unknown precision; requests go to any of them "
        "unless they demand a precision",
    ]


def test_a_decision_between_precisions_says_so():
    made = decision("d", "small")
    assert "held" not in tables.decision_text(made)
    for candidate, precision in zip(made.candidates, ("bf16", "q4_1", ""), strict=True):
        candidate.precision = precision
    assert "weights are held differently: fast in bf16, small in q4_1" in tables.decision_text(made).splitlines()


def test_an_outcome_without_a_forecast_has_dashes():
    routing = Routing("d", "round_robin", "fast", 1, None, 3.118, 0.2, 2.5)
    text = text_of(tables.outcome_table(routing))
    assert cells_of(text, "first token")[-2:] == ["-", "0.200"]
    assert cells_of(text, "finished")[-2:] == ["3.118", "2.500"]


def test_names_are_not_markup():
    made = router_pb2.Decision(candidates=[router_pb2.Candidate(backend="[red]x")], selected="[red]x")
    assert "[red]x" in text_of(tables.decision_table(made))


def test_states_of_the_future_have_a_name():
    assert tables.state_name(99) == "unknown (99)"
