"""From tokens to text: stop strings, what is held back for them, and characters cut in half."""

from __future__ import annotations

from itertools import count

from backend_service.request import FinishReason, Progress
from service_kit.requests import TextPrompt
from tests.integration.engines.bench import Bench
from tests.integration.engines.cases import EngineCase, Lack
from tests.integration.engines.conftest import Alone
from tests.integration.engines.prompts import LENGTH, NEW, Tokens, prompt

NEVER = "\x00\x00"
"""No model here says this."""


def stop_over_a_border(bench: Bench, alone: Alone) -> tuple[Tokens, str]:
    """A prompt, and two characters of its answer that no token has both of."""
    for tokens in (prompt(bench.engine, seed, LENGTH) for seed in count()):
        free = alone(tokens, NEW)
        said = b""
        for token in free.tokens[:-1]:
            said += bench.engine.info.vocabulary.pieces[token]
            border = len(said.decode("utf-8", "replace"))
            stop = free.text[border - 1 : border + 1]
            if border > 1 and "\ufffd" not in stop and free.text.index(stop) == border - 1:
                return tokens, stop
    raise AssertionError("unreachable")


def test_a_stop_string_over_token_borders_ends_the_answer(bench: Bench, alone: Alone):
    tokens, stop = stop_over_a_border(bench, alone)
    free = alone(tokens, NEW)
    stopped = bench.ask(tokens, NEW, stop=[stop, NEVER])
    assert stopped.reason is FinishReason.STOP
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert len(stopped.tokens) < NEW, "it went on after the stop string"


def test_text_held_back_for_a_stop_string_is_shown_at_the_length_limit(bench: Bench, alone: Alone):
    tokens = prompt(bench.engine, 0, LENGTH)
    free = alone(tokens, NEW)
    held = bench.ask(tokens, NEW, stop=[free.text[-2:] + NEVER])
    assert held.reason is FinishReason.LENGTH
    assert held.text == free.text
    assert held.tokens == free.tokens
    *_, last, _end = held.events
    assert isinstance(last, Progress)
    # With the last token: text that comes without one could not be sent again elsewhere without coming twice.
    assert (last.token_ids, last.text[-2:]) == (free.tokens[-1:], free.text[-2:])


def test_text_held_back_for_a_stop_string_is_shown_at_the_models_end(case: EngineCase, bench: Bench, alone: Alone):
    tokens = ending_prompt(case, bench, alone)
    free = alone(tokens, 40, ignore_eos=False)
    assert free.reason is FinishReason.EOS
    held = bench.ask(tokens, 40, stop=[free.text[-1:] + NEVER], ignore_eos=False)
    assert held.reason is FinishReason.EOS
    assert held.text == free.text
    assert not set(held.tokens) & bench.engine.info.vocabulary.eos
    *_, last, _end = held.events
    assert isinstance(last, Progress)
    assert last.token_ids == ()


def test_ignore_eos_generates_on(case: EngineCase, bench: Bench, alone: Alone):
    tokens = ending_prompt(case, bench, alone)
    short = alone(tokens, 40, ignore_eos=False)
    longer = bench.ask(tokens, len(short.tokens) + 4, ignore_eos=True)
    assert longer.reason is FinishReason.LENGTH
    assert longer.tokens[: len(short.tokens)] == short.tokens


def test_characters_cut_over_tokens_are_put_together(case: EngineCase, bench: Bench):
    case.needs(Lack.MULTIBYTE)
    pieces = bench.engine.info.vocabulary.pieces
    answer = bench.ask(bench.engine.prepare(TextPrompt("🦙🌍👩‍👩‍👧 naïve 北京" * 2)), 30)
    cut = [token for token in answer.tokens if "\ufffd" in pieces[token].decode("utf-8", "replace")]
    assert cut, "no token cuts a character; the prompt must be changed"
    assert answer.text == b"".join(pieces[token] for token in answer.tokens).decode("utf-8", "replace")


def ending_prompt(case: EngineCase, bench: Bench, alone: Alone) -> Tokens:
    """A prompt whose answer the model ends itself, after some text and within 40 tokens."""
    if case.ending_prompt is not None:
        return tuple(bench.engine.prepare(case.ending_prompt))
    candidates = (prompt(bench.engine, seed, LENGTH) for seed in count())
    return next(
        tokens
        for tokens in candidates
        if (answer := alone(tokens, 40, ignore_eos=False)).reason is FinishReason.EOS and answer.text
    )
