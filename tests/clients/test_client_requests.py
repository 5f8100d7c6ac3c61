from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseroute.errors import PhaserouteError
from phaseroute.requests import GenerateOptions, PriorityName, generate_request, prompt_message
from phaseroute.v1 import inference_pb2 as pb

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_text_arrives_as_it_is(text: str):
    assert prompt_message(text) == pb.Prompt(text=text)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_token_ids_arrive_as_they_are(ids: list[int]):
    assert list(prompt_message(ids).token_ids.ids) == ids


@given(st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), min_size=1))
def test_chat_arrives_as_it_is(turns: list[dict[str, str]]):
    sent = prompt_message(turns)
    assert [{"role": turn.role, "content": turn.content} for turn in sent.chat.messages] == turns


@pytest.mark.parametrize("prompt", [[1, "two"], [{"role": "user"}], [{"role": "user", "content": "x", "name": "y"}]])
def test_other_shapes_are_type_errors(prompt):
    with pytest.raises(TypeError, match="prompt"):
        prompt_message(prompt)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("\ud800", {}, "prompt.text"),
        ([-1], {}, "prompt.token_ids"),
        ([2**32], {}, "prompt.token_ids"),
        ([{"role": "user", "content": "\udcff"}], {}, "prompt.chat.messages[0].content"),
        ("x", {"max_new_tokens": 2**40}, "max_new_tokens"),
        ("x", {"seed": -1}, "sampling.seed"),
        ("x", {"stop": ["\ud800"]}, "stop"),
        ("x", {"backend": "\ud800"}, "routing.backend"),
        ("x", {"priority": "urgent"}, "priority"),
        ("x", {"priority": "unspecified"}, "priority"),
    ],
)
def test_what_the_wire_cannot_carry_is_named(prompt, options, field):
    with pytest.raises(PhaserouteError) as caught:
        generate_request(prompt, options)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_every_option_has_a_place_on_the_wire():
    examples = {"int": 3, "float": 0.5, "str": "a", "bool": True, "str | Sequence[str]": ["a"], "Sequence[str]": ["a"]}
    examples["PriorityName"] = "batch"
    options = {name: examples[kind.__forward_arg__] for name, kind in GenerateOptions.__annotations__.items()}
    request = generate_request("x", options)
    for name, value in options.items():
        holders = [
            part for part in (request, request.sampling, request.routing) if name in part.DESCRIPTOR.fields_by_name
        ]
        assert len(holders) == 1, name
        sent = getattr(holders[0], name)
        expected = pb.PRIORITY_BATCH if name == "priority" else value
        assert (list(sent) if isinstance(value, list) else sent) == expected


def test_every_priority_of_the_wire_has_a_name():
    wire = {pb.Priority.Name(generate_request("x", {"priority": name}).priority) for name in get_args(PriorityName)}
    assert wire == set(pb.Priority.keys()) - {"PRIORITY_UNSPECIFIED"}


def test_every_request_field_has_an_option():
    inner = {"prompt", "sampling", "routing", "attempt"}
    wire = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} - inner
    wire |= {field.name for message in (pb.Sampling, pb.RoutingHints) for field in message.DESCRIPTOR.fields}
    assert wire == set(GenerateOptions.__annotations__)


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="max_tokens"):
        generate_request("x", {"max_tokens": 3})  # type: ignore[typeddict-unknown-key]
