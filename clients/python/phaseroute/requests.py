"""From Python values to request messages. A server refuses bad values; only what the wire cannot carry fails here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args

import grpc

from phaseroute.errors import PhaserouteError
from phaseroute.v1 import inference_pb2 as pb

PromptLike = str | Sequence[Mapping[str, str]] | Sequence[int]
"""Text, chat messages such as `{"role": "user", "content": "Hi"}`, or token ids of the served model."""

PriorityName = Literal["interactive", "batch"]


class GenerateOptions(TypedDict, total=False):
    """What can be asked for besides the prompt; whatever is left out has the server's default."""

    max_new_tokens: int
    """Default 256. Prompt and new tokens together must fit the model's context."""
    temperature: float
    """Default 0: greedy."""
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    stop: str | Sequence[str]
    """Generation ends before the first of these."""
    ignore_eos: bool
    """Go on to max_new_tokens whatever the model says."""
    priority: PriorityName
    """Default interactive. On a backend that schedules by priority, batch lets interactive requests go first."""
    workload: str
    """A free label for requests whose answers are alike in length."""
    model: str
    policy: str
    """The router's policy for this request."""
    backend: str
    """Send it to this backend and nowhere else."""
    excluded_backends: Sequence[str]
    """Never send it to these."""
    precision: str
    """Send it only to backends that hold their weights so, such as "q4_1"; `status().model.precision` says how."""
    ttft_slo_s: float
    """Longest acceptable time to the first token, in seconds. A router that forecasts refuses the request at once with
    RESOURCE_EXHAUSTED when no backend would keep it; a timeout is treated likewise."""


_SAMPLING = frozenset(field.name for field in pb.Sampling.DESCRIPTOR.fields)
_ROUTING = frozenset(field.name for field in pb.RoutingHints.DESCRIPTOR.fields)


def generate_request(prompt: PromptLike, options: GenerateOptions) -> pb.GenerateRequest:
    """Raises `TypeError` for an unknown option, `PhaserouteError` for a value that the wire cannot carry."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        known = ", ".join(GenerateOptions.__annotations__)
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; choose from {known}")
    request = pb.GenerateRequest(prompt=prompt_message(prompt))
    for name, value in options.items():
        if name in _SAMPLING:
            _put(request.sampling, name, value, f"sampling.{name}")
        elif name in _ROUTING:
            _put(request.routing, name, value, f"routing.{name}")
        elif name == "priority":
            request.priority = _priority(value)
        else:
            _put(request, name, value, name)
    return request


def prompt_message(prompt: PromptLike) -> pb.Prompt:
    """Raises `TypeError` when `prompt` has none of the three forms."""
    message = pb.Prompt()
    if isinstance(prompt, str):
        _put(message, "text", prompt, "prompt.text")
    elif all(isinstance(item, Mapping) for item in prompt):
        message.chat.SetInParent()
        for index, turn in enumerate(prompt):
            _add_turn(message.chat, index, turn)
    elif all(isinstance(item, int) for item in prompt):
        _put(message.token_ids, "ids", prompt, "prompt.token_ids")
    else:
        raise TypeError("prompt must be text, a list of {'role': ..., 'content': ...} or a list of token ids")
    return message


def _add_turn(chat: pb.Chat, index: int, turn: Any) -> None:
    if turn.keys() != {"role", "content"}:
        raise TypeError(f"prompt[{index}] must have the keys 'role' and 'content', has {sorted(turn)}")
    message = chat.messages.add()
    for key in ("role", "content"):
        _put(message, key, turn[key], f"prompt.chat.messages[{index}].{key}")


def _priority(name: Any) -> pb.Priority:
    known = get_args(PriorityName)
    if name not in known:
        raise PhaserouteError(
            grpc.StatusCode.INVALID_ARGUMENT, f"priority: is {name!r}; use {' or '.join(known)}", field="priority"
        )
    value: pb.Priority = getattr(pb, f"PRIORITY_{name.upper()}")
    return value


def _put(message: Any, name: str, value: Any, path: str) -> None:
    """Set one field; a lone string stands for a list of one."""
    try:
        held = getattr(message, name)
        if hasattr(held, "extend"):
            held.extend([value] if isinstance(value, str) else value)
        else:
            setattr(message, name, value)
    except ValueError as error:
        problem = "is not valid Unicode" if isinstance(error, UnicodeError) else f"does not fit: {error}"
        raise PhaserouteError(grpc.StatusCode.INVALID_ARGUMENT, f"{path}: {problem}; correct it", field=path) from error
