"""Hypothesis strategies from the descriptors of the contract: every field, with edge values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from phaseroute.v1 import inference_pb2 as pb
from tests.fuzz.calls import METHODS, WEIGHTS, Call, Method
from tests.fuzz.headers import headers

MOST_FIELDS = 5
LONG_LIST = 700
"""More items than the context has tokens."""

_NAMES = ("b0", "b1", "simulated", "none", "predictive", "two_phase", "round_robin", "forced:b0", "user", "system")
_STRINGS = ("", " ", "\0", "\n\r", "é", "\U0001f642" * 64, "x" * 255, "x" * 256, "x" * 257, "x" * 20_000, "%s{}")
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-45, 1e-308, 3e38, float("nan"), float("inf"), float("-inf"))
_DOUBLES = (*_FLOATS, 1e308, 5e-324)
_EDGES = {
    FieldDescriptor.TYPE_INT32: (0, 1, 2, 8, 255, 256, 512, 2**31 - 1, -1, -(2**31)),
    FieldDescriptor.TYPE_UINT32: (0, 1, 2, 255, 256, 257, 512, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**32, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_FLOAT: _FLOATS,
    FieldDescriptor.TYPE_DOUBLE: _DOUBLES,
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_ENUM: (0, 1, 2, 3, 99, 2**31 - 1, -1, -(2**31)),
}


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A well-formed message for some method, with headers."""
    method = draw(_methods)
    return Call(
        method=method.path,
        body=draw(messages(method.request.DESCRIPTOR.full_name)).SerializeToString(),
        metadata=draw(headers),
        at_router=method.router_only or draw(st.booleans()),
        how="structured",
    )


@cache
def messages(full_name: str) -> st.SearchStrategy[Any]:
    """Messages of a type: a few fields are set, to anything."""
    kind: Any = GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(full_name))
    fields: Sequence[Any] = tuple(kind.DESCRIPTOR.fields)
    if not fields:
        return st.just(kind())

    @st.composite
    def made(draw: st.DrawFn) -> Message:
        message: Message = kind()
        for field in draw(st.lists(st.sampled_from(fields), unique_by=lambda one: one.name, max_size=MOST_FIELDS)):
            _put(message, field, draw(_values(field)))
        return message

    return made().map(_mostly_answerable) if kind is pb.GenerateRequest else made()


def _mostly_answerable(request: Any) -> Any:
    """What is left out is filled in so that other fields are what the request fails by, if it does."""
    if not request.HasField("max_new_tokens"):
        request.max_new_tokens = 4
    if not request.HasField("prompt"):
        request.prompt.text = "Hello"
    return request


def _put(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.is_repeated and field.type == FieldDescriptor.TYPE_MESSAGE:
        for item in value:
            getattr(message, field.name).add().CopyFrom(item)
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    one = _scalars(field)
    if not field.is_repeated:
        return one
    return st.lists(one, max_size=5) | one.map(lambda item: [item] * LONG_LIST)


def _scalars(field: Any) -> st.SearchStrategy[Any]:
    match field.type:
        case FieldDescriptor.TYPE_MESSAGE:
            return messages(field.message_type.full_name)
        case FieldDescriptor.TYPE_STRING:
            return st.sampled_from(_NAMES) | st.sampled_from(_STRINGS) | st.text(max_size=40)
        case FieldDescriptor.TYPE_ENUM:
            return st.sampled_from(_EDGES[field.type])
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return st.sampled_from(_EDGES[field.type]) | st.floats(0, 2, width=32)
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_INT32 | FieldDescriptor.TYPE_UINT32 | FieldDescriptor.TYPE_UINT64:
            return st.sampled_from(_EDGES[field.type]) | st.integers(0, 300)
        case kind:
            raise NotImplementedError(f"{field.full_name} has type {kind}; say here what its edge values are")


_methods: st.SearchStrategy[Method] = st.sampled_from(
    [method for method, weight in zip(METHODS, WEIGHTS, strict=True) for _ in range(weight)]
)
