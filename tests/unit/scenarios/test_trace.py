from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseroute.scenarios.bounds import BadScenario
from phaseroute.scenarios.planned import Planned, Scenario
from phaseroute.scenarios.presets import PRESETS, build
from phaseroute.scenarios.trace import read_trace, write_trace

HEADER = "at_s,prompt_tokens,max_new_tokens,new_tokens"


def written(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def refusal(path):
    with pytest.raises(BadScenario) as raised:
        read_trace(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


planned = st.builds(
    lambda at_s, prompt, shared, prefix, budget, new, **others: Planned(
        at_s=at_s,
        prompt_tokens=prompt,
        prefix=prefix,
        prefix_tokens=min(shared, prompt - 1),
        max_new_tokens=budget,
        new_tokens=min(new, budget),
        **others,
    ),
    st.floats(0, 1e6),
    st.integers(2, 5000),
    st.integers(0, 5000),
    st.integers(-1, 5),
    st.integers(1, 5000),
    st.integers(1, 5000),
    workload=st.sampled_from(["", "chat", 'a "quoted", one']),
    batch=st.booleans(),
    deadline_s=st.none() | st.floats(0.1, 1e6),
    ttft_slo_s=st.none() | st.floats(0.1, 1e6),
)


@settings(max_examples=40)
@given(st.lists(planned, min_size=1, max_size=8), st.sampled_from(["t.csv", "t.jsonl"]))
def test_what_was_written_is_read_again_to_the_last_digit(tmp_path_factory, requests, name):
    requests.sort(key=lambda each: each.at_s)
    path = tmp_path_factory.mktemp("trace") / name
    write_trace(path, Scenario("n", "", tuple(requests)))
    assert read_trace(path).requests == tuple(requests)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"wide"}))
def test_every_scenario_can_be_saved_as_a_trace(tmp_path, name, suffix):
    scenario = build(name, seed=4)
    path = tmp_path / f"{name}{suffix}"
    write_trace(path, scenario)
    assert replace(build(f"trace:{path}"), name=name, description=scenario.description) == scenario


def test_columns_may_come_in_any_order_and_optional_ones_may_be_left_out_or_empty(tmp_path):
    text = "new_tokens,max_new_tokens,workload,prompt_tokens,at_s,deadline_s\n5,10,chat,20,0.5,\n\n10,10,,20,0.5,3\n"
    first, second = read_trace(written(tmp_path, text)).requests
    assert first == Planned(at_s=0.5, prompt_tokens=20, max_new_tokens=10, new_tokens=5, workload="chat")
    assert (second.workload, second.deadline_s) == ("", 3.0)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("x,20,10,10", "row 3, at_s: 'x': input should be a valid number"),
        ("nan,20,10,10", "row 3, at_s: 'nan': input should be"),
        ("-1,20,10,10", "row 3, at_s: '-1': input should be greater than or equal to 0"),
        ("1,1,10,10", "row 3, prompt_tokens: '1': input should be greater than or equal to 2"),
        ("1,20.5,10,10", "row 3, prompt_tokens: '20.5': input should be a valid integer"),
        ("1,20,0,10", "row 3, max_new_tokens: '0': input should be greater than or equal to 1"),
        ("1,20,10,11", "row 3: new_tokens is 11; give 1 to max_new_tokens, which is 10"),
        ("1,20,10", "row 3: 3 cells; give 4, as the header has"),
        ("1,,10,10", "row 3, prompt_tokens: field required"),
        ("0.5,20,10,10", "row 3, at_s: 0.5 comes before 0.9 of the row above; sort the rows by at_s"),
    ],
)
def test_a_bad_row_is_refused_with_its_place_and_what_is_allowed(tmp_path, row, says):
    path = written(tmp_path, f"{HEADER}\n0.9,20,10,10\n{row}\n")
    assert f"{path}, {says}" in refusal(path)


def test_a_prefix_is_shorter_than_its_prompt(tmp_path):
    path = written(tmp_path, f"{HEADER},prefix,prefix_tokens\n0,20,10,10,0,20\n")
    assert "row 2: prefix_tokens is 20; give less than prompt_tokens, which is 20" in refusal(path)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("at_s,prompt_tokens,new_tokens", "row 1: no column max_new_tokens"),
        (f"{HEADER},color", "row 1: column 'color'; give each of at_s, "),
        (f"{HEADER},at_s", "row 1: column 'at_s'"),
    ],
)
def test_a_bad_header_is_refused_with_what_it_must_have(tmp_path, header, says):
    assert says in refusal(written(tmp_path, f"{header}\n"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "row 2: no JSON"),
        ("[" * 100_000, "row 2: no JSON"),
        ("[1]", "row 2: list is no request; write one object a line"),
        ('{"at_s": 1}', "row 2, prompt_tokens: field required"),
        (
            json.dumps({"at_s": 1, "prompt_tokens": 9, "max_new_tokens": 1, "new_tokens": 1, "x": 1}),
            "row 2, x: unknown;",
        ),
    ],
)
def test_a_bad_line_of_json_is_refused_with_its_place(tmp_path, line, says):
    good = json.dumps({"at_s": 0, "prompt_tokens": 9, "max_new_tokens": 1, "new_tokens": 1})
    path = written(tmp_path, f"{good}\n{line}\n", "t.jsonl")
    assert f"{path}, {says}" in refusal(path)


def test_files_that_are_none_are_refused(tmp_path):
    assert "cannot be read: No such file" in refusal(tmp_path / "nowhere.csv")
    assert "has no requests" in refusal(written(tmp_path, f"{HEADER}\n"))
    assert "has no requests" in refusal(written(tmp_path, "", "empty.jsonl"))
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "no UTF-8 text" in refusal(binary)


@given(st.binary(max_size=200), st.sampled_from(["csv", "jsonl"]))
def test_any_bytes_are_a_trace_or_a_bad_scenario(tmp_path_factory, content, kind):
    path = tmp_path_factory.mktemp("any") / f"t.{kind}"
    path.write_bytes(content)
    refusal(path)
