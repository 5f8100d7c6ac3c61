from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_service.chat import render_chat
from service_kit.faults import InvalidRequest
from service_kit.requests import ChatTurn

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nBe brief<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = ChatTurn("user", "Hi")


def render(template: str, *turns: ChatTurn) -> str:
    return render_chat(template, turns or (USER,), bos="<s>", eos="</s>")


def refusal(template: str, *turns: ChatTurn) -> str:
    with pytest.raises(InvalidRequest) as caught:
        render(template, *turns)
    assert caught.value.field == "prompt.chat"
    return caught.value.problem


def test_a_chat_ends_where_the_answer_begins() -> None:
    assert render(
        CHATML, ChatTurn("system", "Rhyme."), USER, ChatTurn("assistant", "Hey"), ChatTurn("user", "So?")
    ) == (
        "<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHey<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_may_add_its_own_system_turn() -> None:
    assert render(CHATML) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_block_lines_leave_no_blank_lines() -> None:
    assert render("{% if true %}\n  {% if true %}\n{{ messages[0].content }}{% endif %}\n{% endif %}") == "Hi"


def test_a_template_sees_bos_and_eos_and_no_tools() -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ documents is none }}"
    assert render(template) == "<s></s>TrueTrue"


def test_what_templates_in_the_wild_call() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}") == "01"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


@given(st.text(min_size=1))
def test_content_is_data_never_template(content: str) -> None:
    assert render("<{{ messages[0].content }}>", ChatTurn("user", content)) == f"<{content}>"


def test_a_template_says_in_its_own_words_why_it_refuses() -> None:
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('Start with the user.') }}{% endif %}{{ bos_token }}"
    )
    assert render(template) == "<s>"
    assert refusal(template, ChatTurn("assistant", "Hi")) == (
        "the model's chat template refuses it: Start with the user; change the messages, or send prompt.text"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ {'user': 'U'}[messages[0].role].name.first }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for n in range(10 ** 9) %}{% endfor %}",
        "{% include 'elsewhere' %}",
        "{{ strftime_now(1) }}",
    ],
)
def test_a_broken_or_hostile_template_is_an_invalid_request(template: str) -> None:
    assert "chat template refuses it" in refusal(template)


def test_a_chat_that_renders_to_nothing_is_refused() -> None:
    assert "is empty" in refusal("{% for m in messages %}{% endfor %}")
