"""An answer that goes on where another backend left it: text, books, and the same tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_service.continuation import Complete, check_generated, resume
from backend_service.engines.base import Vocabulary
from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import PoolLimits
from backend_service.request import Ended, FinishReason, Phase, Progress, Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from service_kit.faults import InvalidRequest
from service_kit.requests import Sampling
from simulator.clock import VirtualClock

BYTES = tuple(bytes([value]) for value in range(256))
END = 256
VOCABULARY = Vocabulary((*BYTES, b""), frozenset({END}))


def resumed(text: TextStream, generated, *, ignore_eos=False, max_new_tokens=100) -> Complete | None:
    return resume(text, generated, eos=VOCABULARY.eos, ignore_eos=ignore_eos, max_new_tokens=max_new_tokens)


def stream(*stop: str) -> TextStream:
    return TextStream(VOCABULARY.pieces, stop)


# -- text -----------------------------------------------------------------------------------------------------------

pieces = st.text(alphabet="ab€ö", max_size=30).map(str.encode)


@given(pieces, st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3), st.data())
def test_what_both_streams_show_is_the_whole_answer_once(answer, stop, data):
    whole, first = stream(*stop), stream(*stop)
    expected = "".join(map(whole.feed, answer)) + whole.flush()
    cut = data.draw(st.integers(0, len(answer)))
    sent = "".join(map(first.feed, answer[:cut]))
    second = stream(*stop)
    complete = resumed(second, answer[:cut])
    if complete:
        assert complete == Complete(FinishReason.STOP, "")
        assert sent == expected
    else:
        assert sent + "".join(map(second.feed, answer[cut:])) + second.flush() == expected


def test_half_a_character_comes_with_the_token_that_completes_it():
    text = stream()
    assert resumed(text, "x€".encode()[:2]) is None
    assert text.feed("€".encode()[1]) == ""
    assert text.feed("€".encode()[2]) == "€"


def test_a_stop_string_goes_on_across_the_cut():
    text = stream("END")
    assert resumed(text, b"some EN") is None
    assert text.feed(ord("D")) == ""
    assert text.stopped


def test_nothing_generated_leaves_all_to_do():
    assert resumed(stream(), ()) is None


@pytest.mark.parametrize(
    ("generated", "options", "complete"),
    [
        (b"abc", {"max_new_tokens": 3}, Complete(FinishReason.LENGTH, "")),
        (b"abEN", {"max_new_tokens": 4}, Complete(FinishReason.LENGTH, "")),
        (b"abEND", {}, Complete(FinishReason.STOP, "")),
        (b"abENDc", {}, Complete(FinishReason.STOP, "")),
        ((*b"ab", END), {}, Complete(FinishReason.EOS, "")),
        ((*b"abEN", END), {}, Complete(FinishReason.EOS, "EN")),
        ((*b"ab", END), {"ignore_eos": True}, None),
        (b"ab", {}, None),
    ],
)
def test_a_complete_answer_is_known(generated, options, complete):
    assert resumed(stream("END"), generated, **options) == complete


def test_what_looked_like_a_longer_stop_string_may_be_a_whole_shorter_one():
    assert resumed(stream("EN", "ENDE"), b"abEN", max_new_tokens=4) == Complete(FinishReason.STOP, "")


def test_an_id_without_a_token_is_named():
    check_generated((0, END), VOCABULARY)
    with pytest.raises(InvalidRequest, match=r"attempt\.generated_token_ids\[1\]: is 257.*ends at 256"):
        check_generated((5, 257), VOCABULARY)


# -- in the scheduler -----------------------------------------------------------------------------------------------


class Bench:
    """A fresh backend."""

    def __init__(self):
        self.clock = VirtualClock()
        self.engine = SimulatedEngine(SimulatedSpeed(1000, {1: 0.01}), PoolLimits(4096, 2), sleep=self.clock.sleep)
        self.scheduler = Scheduler(self.engine, SchedulerLimits(2, StepLimits(64)), clock=self.clock)
        self.tokens: list[int] = []
        self.text = ""
        self.request: Request | None = None

    def ask(self, prompt: bytes, generated=(), *, max_new_tokens=60, stop=(), ignore_eos=False) -> Bench:
        text = stream(*stop)
        assert resume(text, generated, eos=VOCABULARY.eos, ignore_eos=ignore_eos, max_new_tokens=max_new_tokens) is None
        self.request = Request(
            id="r",
            tokens=[*prompt, *generated],
            max_new_tokens=max_new_tokens,
            sampling=Sampling(),
            ignore_eos=ignore_eos,
            text=text,
            eos=VOCABULARY.eos,
            reusable_estimate=0,
            submitted_s=self.clock(),
            resumed_tokens=len(generated),
        )
        self.scheduler.submit(self.request)
        return self

    def run(self) -> Ended:
        while True:
            for event in self.scheduler.tick():
                if isinstance(event, Progress):
                    self.tokens += event.token_ids
                    self.text += event.text
                if isinstance(event, Ended):
                    self.engine.check_integrity()
                    return event


@pytest.mark.parametrize("cut", [1, 7, 59])
@pytest.mark.parametrize("stop", [(), ("e",), ("th", "o ")])
def test_the_answer_is_the_undisturbed_one(cut, stop):
    whole = Bench().ask(b"prompt of some length", stop=stop)
    end = whole.run()
    cut = min(cut, end.generated_tokens - 1)
    sent = stream(*stop)
    shown = "".join(map(sent.feed, whole.tokens[:cut]))
    rest = Bench().ask(b"prompt of some length", whole.tokens[:cut], stop=stop)
    second = rest.run()
    assert rest.tokens == whole.tokens[cut:]
    assert shown + rest.text == whole.text
    assert (second.reason, second.generated_tokens, second.prompt_tokens) == (end.reason, end.generated_tokens, 21)


def test_views_count_what_is_generated_already():
    bench = Bench().ask(b"p" * 100, b"answer so far", max_new_tokens=50)
    (view,) = bench.scheduler.snapshot().waiting
    assert (view.prompt_tokens, view.generated_tokens) == (100, 13)
    assert (view.remaining_prefill_tokens, view.remaining_decode_tokens) == (113, 37)
    bench.scheduler.tick()
    (view,) = bench.scheduler.snapshot().active
    assert (view.phase, view.remaining_prefill_tokens, view.context_tokens) == (Phase.PREFILL, 49, 64)
    bench.scheduler.tick()
    (view,) = bench.scheduler.snapshot().active
    assert (view.phase, view.generated_tokens, view.remaining_decode_tokens) == (Phase.DECODE, 14, 36)
    assert (view.remaining_prefill_tokens, view.context_tokens) == (0, 113)


def test_what_was_cached_is_of_the_prompt():
    bench = Bench()
    bench.ask(b"p" * 100, max_new_tokens=20, ignore_eos=True).run()
    again = bench.ask(b"p" * 100, bench.tokens[:10], max_new_tokens=20, ignore_eos=True)
    end = again.run()
    assert end.cached_tokens == 100
    assert bench.request.computed_tokens == 119


def test_the_worst_case_is_what_is_left():
    bench = Bench().ask(b"p" * 100, b"a" * 30, max_new_tokens=50)
    bench.scheduler.tick()
    use = bench.engine.stats()
    assert use.used_tokens + use.reserved_tokens == 150


def test_the_last_token_brings_what_was_held_back():
    """Who has all token ids has all of the text, also where the end of the stream is lost."""
    bench = Bench().ask(b"prompt", max_new_tokens=9, ignore_eos=True, stop=("\x00",))
    events = []
    while bench.scheduler.busy:
        events += bench.scheduler.tick()
    last = chr(events[-2].token_ids[-1])
    bench = Bench().ask(b"prompt", max_new_tokens=9, ignore_eos=True, stop=(f"{last}never",))
    events = []
    while bench.scheduler.busy:
        events += bench.scheduler.tick()
    assert isinstance(events[-1], Ended)
    assert events[-2].text.endswith(last)
    assert len(events[-2].token_ids) == 1


def test_the_engine_is_told_what_was_sampled_before_and_whose_cache_it_is():
    class Recording(SimulatedEngine):
        def admit(self, tokens, max_new_tokens, sampling, *, ignore_eos, generated=0, cache_salt=""):
            asked.append((len(tokens), max_new_tokens, ignore_eos, generated, cache_salt))
            return super().admit(tokens, max_new_tokens, sampling, ignore_eos=ignore_eos)

    asked = []
    engine = Recording(SimulatedSpeed(1000, {1: 0.01}), PoolLimits(4096, 2), sleep=lambda seconds: None)
    scheduler = Scheduler(engine, SchedulerLimits(2, StepLimits(64)))
    scheduler.submit(
        Request(
            id="r",
            tokens=[1] * 30,
            max_new_tokens=50,
            sampling=Sampling(seed=7, temperature=1.0),
            ignore_eos=True,
            text=stream(),
            eos=VOCABULARY.eos,
            reusable_estimate=0,
            submitted_s=0.0,
            resumed_tokens=10,
            cache_salt="of alice",
        )
    )
    scheduler.tick()
    assert asked == [(30, 40, True, 10, "of alice")]
