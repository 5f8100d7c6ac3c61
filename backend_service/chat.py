"""A model's own chat template, as GGUF files carry it: Jinja source that came with the weights, hence sandboxed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service_kit.faults import InvalidRequest
from service_kit.requests import ChatTurn

_FIELD = "prompt.chat"


def render_chat(template: str, turns: Sequence[ChatTurn], *, bos: str, eos: str, now: datetime | None = None) -> str:
    """The prompt for these turns, ending where the assistant's answer begins.

    `bos` and `eos` are the texts of the model's begin and end tokens, which most templates write out themselves; `now`
    is the time for templates that ask for it, by default that of the clock.
    Raises `InvalidRequest` with the template's own words when it refuses the turns.
    """
    try:
        rendered = _compiled(template).render(
            messages=[{"role": turn.role, "content": turn.content} for turn in turns],
            add_generation_prompt=True,
            bos_token=bos,
            eos_token=eos,
            tools=None,
            documents=None,
            strftime_now=(now or datetime.now()).strftime,
        )
    # Beside its own errors, Jinja passes on what the template's expressions raise.
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise InvalidRequest(
            _FIELD, f"the model's chat template refuses it: {reason}; change the messages, or send prompt.text"
        ) from error
    if not rendered:
        raise InvalidRequest(_FIELD, "is empty once the model's chat template is applied; send prompt.text instead")
    return rendered


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _tojson
    return environment.from_string(template)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared as an instance variable upstream

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
