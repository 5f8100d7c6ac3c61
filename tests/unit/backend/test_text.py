from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend_service.text import TextStream

LETTERS = st.sampled_from(["a", "b", "c", "é", "e\u0301", "€", "👩‍👩‍👧", "🇩🇪", "\ufffd", "]", "^", "-", "\\", "\n"])
"""Few, so that stop strings come up and overlap; one to four bytes, combining marks, joined emoji, regex characters."""
TEXT = st.lists(LETTERS, max_size=25).map("".join)
STOP = st.lists(st.lists(LETTERS, min_size=1, max_size=5).map("".join), max_size=4)
CUTS = st.lists(st.integers(0, 4), max_size=60)


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Pieces of these sizes, the last one taking the rest; empty pieces stand for control tokens."""
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


def up_to_first_stop(text: str, stop: Sequence[str]) -> str:
    return text[: min((text.find(string) for string in stop if string in text), default=len(text))]


def shown_by(pieces: Sequence[bytes], stop: Sequence[str]) -> list[str]:
    stream = TextStream(pieces, stop)
    return [*(stream.feed(token_id) for token_id in range(len(pieces))), stream.flush()]


def held_for(text: str, stop: Sequence[str]) -> str:
    """The longest tail of a text that a stop string starts with."""
    starts = (start for start in range(len(text)) if any(s.startswith(text[start:]) for s in stop))
    return text[next(starts, len(text)) :]


@settings(max_examples=500, deadline=None)
@given(TEXT, CUTS, STOP)
@example("abc", [1, 1], ["abcd", "bc"])
@example("abcd", [1, 1, 1], ["abcd", "bc"])
@example("aaab", [1, 1, 1], ["aab"])
def test_any_cut_gives_the_text_up_to_the_first_stop(text: str, sizes: list[int], stop: list[str]) -> None:
    assert "".join(shown_by(cut(text.encode(), sizes), stop)) == up_to_first_stop(text, stop)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=4), LETTERS.map(str.encode)), max_size=12).map(b"".join), CUTS, STOP)
def test_invalid_bytes_are_shown_as_they_decode_as_a_whole(data: bytes, sizes: list[int], stop: list[str]) -> None:
    expected = up_to_first_stop(data.decode("utf-8", "replace"), stop)
    assert "".join(shown_by(cut(data, sizes), stop)) == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(LETTERS, max_size=25), STOP)
def test_no_more_is_held_back_than_a_stop_string_may_need(letters: list[str], stop: list[str]) -> None:
    stream = TextStream([letter.encode() for letter in letters], stop)
    fed = shown = ""
    for token_id, letter in enumerate(letters):
        fed += letter
        shown += stream.feed(token_id)
        if stream.stopped:
            break
        assert shown + held_for(fed, stop) == fed


@settings(max_examples=200, deadline=None)
@given(TEXT, CUTS, STOP)
def test_stopped_tells_whether_a_stop_string_came_up_and_is_final(text: str, sizes: list[int], stop: list[str]) -> None:
    pieces = cut(text.encode(), sizes)
    stream = TextStream([*pieces, b"more"], stop)
    was_stopped = False
    for token_id in range(len(pieces)):
        shown = stream.feed(token_id)
        assert not (was_stopped and shown)
        assert stream.stopped or not was_stopped
        was_stopped = stream.stopped
    stream.flush()
    assert stream.stopped == any(string in text for string in stop)
    if stream.stopped:
        assert stream.feed(len(pieces)) == stream.flush() == ""


def test_a_character_cut_over_tokens_is_shown_once_it_is_whole() -> None:
    assert shown_by(cut("né👍".encode(), [2, 1, 1, 1, 1, 1]), ()) == ["n", "é", "", "", "", "👍", "", ""]


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    assert shown_by([b"a\xf0\x9f", b"\x91"], ()) == ["a", "", "\ufffd"]


def test_bytes_that_cannot_become_a_character_are_shown_at_once() -> None:
    assert shown_by([b"a\xf0\x9f", b"b"], ()) == ["a", "\ufffdb", ""]


def test_text_held_for_half_a_stop_string_is_not_lost() -> None:
    assert shown_by([b"one\n", b"\nUs", b"er"], ["\n\nUser:"]) == ["one", "", "", "\n\nUser"]


def test_a_stop_string_over_many_tokens_ends_the_text_before_it() -> None:
    stream = TextStream([b"yes\n", b"\nUs", b"er", b": no", b"!"], ["\n\nUser:"])
    assert [stream.feed(token_id) for token_id in range(4)] == ["yes", "", "", ""]
    assert stream.stopped
    assert stream.feed(4) == stream.flush() == ""


def test_a_stop_string_inside_a_longer_candidate_waits_for_it() -> None:
    stream = TextStream([b"abc", b"d"], ["abcd", "bc"])
    assert stream.feed(0) == ""
    assert not stream.stopped
    assert stream.flush() == "a"
    assert stream.stopped


def test_a_stop_string_may_end_in_the_character_that_flush_gives_up() -> None:
    stream = TextStream([b"ab\xe2\x82"], ["b\ufffd"])
    assert stream.feed(0) == "a"
    assert stream.flush() == ""
    assert stream.stopped


def test_long_repetitive_stop_strings() -> None:
    stop = ["a" * length + "b" for length in range(1000, 1016)]
    text = "a" * 999 + "c" + "a" * 3000 + "b" + "tail"
    pieces = cut(text.encode(), [4] * 900)
    assert "".join(shown_by(pieces, stop)) == text[: 1000 + 3000 - 1015]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="leave it out"):
        TextStream([], ["x", ""])
