"""What a fuzz run sends."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from service_kit.faults import InvalidRequest
from service_kit.requests import parse_generate
from tests.fuzz.calls import BY_PATH, METHODS, Call
from tests.fuzz.damage import WAYS
from tests.fuzz.inputs import chunks


@pytest.fixture(scope="module")
def made() -> list[Call]:
    return [call for chunk in chunks(1, 1200) for call in chunk]


def test_equal_seeds_make_equal_calls(made):
    assert len(made) == 1200
    assert [call for chunk in chunks(1, 100) for call in chunk] == [call for chunk in chunks(1, 100) for call in chunk]
    assert [call for chunk in chunks(2, 100) for call in chunk] != [call for chunk in chunks(1, 100) for call in chunk]


def test_every_method_and_every_kind_of_damage_is_there(made):
    assert {call.method for call in made} == {method.path for method in METHODS}
    assert {call.how for call in made} == {"structured", "merged", *WAYS}
    assert {call.at_router for call in made} == {True, False}
    assert not any(BY_PATH[call.method].router_only and not call.at_router for call in made)


def test_well_formed_ones_are_messages_of_which_some_are_answered_and_some_refused(made):
    valid = 0
    requests = [call for call in made if call.how not in WAYS and call.method.endswith("Generate")]
    for call in requests:
        try:
            parse_generate(BY_PATH[call.method].request.FromString(call.body))
            valid += 1
        except InvalidRequest:
            pass
    assert 0.15 < valid / len(requests) < 0.8


def test_damaged_ones_are_often_no_messages(made):
    broken = 0
    damaged = [call for call in made if call.how in WAYS]
    for call in damaged:
        try:
            BY_PATH[call.method].request.FromString(call.body)
        except (DecodeError, UnicodeDecodeError):
            broken += 1
    assert 0.2 < broken / len(damaged) < 0.95


def test_call_can_be_written_down_and_made_again(made):
    assert [Call.from_json(call.to_json()) for call in made] == made
