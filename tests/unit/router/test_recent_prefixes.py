from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_service.recent_prefixes import (
    BACKENDS_PER_KEY,
    BEGINNINGS_TOKENS,
    BYTES_PER_TOKEN,
    MAX_KEYS,
    RecentPrefixes,
    key_of,
)
from service_kit.requests import ChatPrompt, ChatTurn, TextPrompt, TokenPrompt


def tokens(*runs):
    """Runs of (how many, which id)."""
    return TokenPrompt(tuple(id_ for count, id_ in runs for _ in range(count)))


def chat(*contents):
    roles = ("user", "assistant")
    return ChatPrompt(tuple(ChatTurn(roles[place % 2], content) for place, content in enumerate(contents)))


def alike(one, other):
    """How many beginnings two prompts have in common."""
    mine, theirs = key_of(one), key_of(other)
    common = sum(a == b for a, b in zip(mine, theirs, strict=False))
    assert mine[:common] == theirs[:common]
    return common


# Keys


@pytest.mark.parametrize(("length", "keys"), [(1, 0), (63, 0), (64, 1), (255, 1), (256, 2), (4096, 4), (100_000, 4)])
def test_a_prompt_has_the_beginnings_that_it_is_long_enough_for(length, keys):
    assert len(key_of(tokens((length, 7)))) == keys
    assert len(key_of(TextPrompt("a" * length * BYTES_PER_TOKEN))) == keys


def test_prompts_are_alike_as_far_as_their_tokens_are():
    shared = tokens((300, 1))

    assert alike(shared, tokens((300, 1), (5000, 2))) == 2
    assert alike(shared, tokens((256, 1), (44, 2))) == 2
    assert alike(shared, tokens((255, 1), (45, 2))) == 1
    assert alike(shared, tokens((1, 2), (299, 1))) == 0


def test_prompts_are_alike_as_far_as_their_bytes_are():
    assert alike(TextPrompt("a" * 1024), TextPrompt("a" * 1024 + "b")) == 2
    assert alike(TextPrompt("a" * 1023 + "b"), TextPrompt("a" * 1024)) == 1


def test_a_beginning_may_end_within_a_letter():
    umlauts = TextPrompt("a" + "\u00fc" * 200)

    assert len(key_of(TextPrompt("\u00fc" * 128))) == 1
    assert alike(umlauts, TextPrompt("a" + "\u00fc" * 127 + "\u00e9" * 200)) == 1  # they have the first byte in common
    assert alike(umlauts, TextPrompt("a" + "\u00fc" * 127 + "b" * 200)) == 0


def test_a_longer_conversation_begins_like_the_shorter_one():
    first = "Tell me of ships. " * 60

    assert alike(chat(first), chat(first, "They float.", "And then?")) == 2
    assert alike(chat(first), chat(first + "!", "They float.")) == 2


def test_a_chat_that_is_split_up_otherwise_or_by_others_is_another():
    text = "b" * 500

    assert alike(chat("a" + text, text), chat("a", text + text)) == 0
    assert alike(ChatPrompt((ChatTurn("user", text),)), ChatPrompt((ChatTurn("system", text),))) == 0
    assert alike(ChatPrompt((ChatTurn("user", text),)), ChatPrompt((ChatTurn("use", "r" + text),))) == 0


def test_the_same_text_in_another_form_is_another_prompt():
    assert alike(TextPrompt("user\0" + "a" * 500), chat("a" * 500)) == 0
    assert alike(TextPrompt("\0" * 4096), tokens((512, 0))) == 0


def test_all_turns_count_up_to_the_longest_beginning():
    turns = ["word " * 10] * 400

    assert len(key_of(chat(*turns))) == len(BEGINNINGS_TOKENS)
    assert alike(chat(*turns), chat(*turns[:-1], "other")) == len(BEGINNINGS_TOKENS)
    assert alike(chat(*turns), chat(*turns[:100], "sword" * 10, *turns[101:])) == 3
    assert alike(chat("a" * 100, "b" * 500), chat("c" * 100, "b" * 500)) == 0


@given(st.lists(st.text(max_size=300), min_size=1, max_size=8))
def test_a_chat_has_the_beginnings_that_its_turns_together_are_long_enough_for(contents):
    keys = key_of(chat(*contents))
    size = sum(len(turn.role.encode()) + len(turn.content.encode()) + 2 for turn in chat(*contents).turns)

    assert len(keys) == sum(size >= BYTES_PER_TOKEN * tokens for tokens in BEGINNINGS_TOKENS)
    assert len(set(keys)) == len(keys)


# Who had them


def test_those_of_the_longest_common_beginning_come_first():
    recent = RecentPrefixes()
    recent.note(key_of(tokens((1024, 1))), "long")
    recent.note(key_of(tokens((64, 1), (1000, 2))), "short")

    assert recent.likely(key_of(tokens((2000, 1))), 5) == ["long", "short"]
    assert recent.likely(key_of(tokens((64, 1), (1000, 3))), 5) == ["short", "long"]
    assert recent.likely(key_of(tokens((2000, 1))), 1) == ["long"]
    assert recent.likely(key_of(tokens((2000, 4))), 5) == []


def test_among_equals_the_latest_comes_first():
    recent = RecentPrefixes()
    keys = key_of(tokens((64, 1)))
    for backend in ("a", "b", "a"):
        recent.note(keys, backend)

    assert recent.likely(keys, 5) == ["a", "b"]


def test_a_backend_that_got_a_beginning_often_takes_nobody_elses_place():
    recent = RecentPrefixes()
    for backend in ("b", *["a"] * 10):
        recent.note([b"key"], backend)

    assert recent.likely([b"key"], 5) == ["a", "b"]


def test_a_beginning_knows_the_latest_backends_only():
    recent = RecentPrefixes()
    for number in range(BACKENDS_PER_KEY + 2):
        recent.note([b"key"], f"b{number}")

    assert recent.likely([b"key"], 10) == ["b5", "b4", "b3", "b2"]


def test_the_beginning_that_was_not_noted_for_longest_is_forgotten():
    recent = RecentPrefixes()
    recent.note([b"old"], "a")
    recent.note([b"kept"], "a")
    for number in range(MAX_KEYS):
        if number == MAX_KEYS - 2:
            recent.note([b"kept"], "a")
            recent.likely([b"old"], 1)
        recent.note([str(number).encode()], "a")

    assert len(recent) == MAX_KEYS
    assert recent.likely([b"old"], 1) == []
    assert recent.likely([b"kept"], 1) == ["a"]


def test_a_backend_that_is_forgotten_is_likely_nowhere():
    recent = RecentPrefixes()
    recent.note([b"one", b"two"], "a")
    recent.note([b"two"], "b")

    recent.forget("a")
    recent.forget("never noted")

    assert recent.likely([b"one", b"two"], 5) == ["b"]
    assert len(recent) == 1


def test_a_prompt_without_keys_is_noted_nowhere():
    recent = RecentPrefixes()
    recent.note((), "a")

    assert len(recent) == 0
    assert recent.likely((), 5) == []


@pytest.mark.parametrize(
    "prompt",
    [
        TokenPrompt(tuple(range(300))),
        TextPrompt("word " * 400),
        ChatPrompt((ChatTurn("user", "word " * 400),)),
    ],
)
def test_prompts_under_different_salts_have_nothing_in_common(prompt):
    plain, alice, bob = key_of(prompt), key_of(prompt, "alice"), key_of(prompt, "b" * 256)
    assert len(plain) == len(alice) == len(bob) == 2
    assert not set(plain) & set(alice)
    assert not set(alice) & set(bob)
    assert key_of(prompt, "alice") == alice
