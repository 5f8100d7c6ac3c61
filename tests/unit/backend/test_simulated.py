"""The simulated engine: its times, its tokens, its settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_service.engines.base import Slice
from backend_service.engines.simulated import END_TOKEN, ModelSpeed, SimulatedEngine, SimulatedSpeed, parse_decode_steps
from backend_service.host_tier import BLOCK_TOKENS
from backend_service.kv_pool import PoolLimits
from backend_service.step_model import IsolatedRates, StepFit
from service_kit.faults import InvalidRequest, StartupFailed
from service_kit.requests import ChatPrompt, ChatTurn, Sampling, TextPrompt, TokenPrompt
from service_kit.step_time import StepModel, StepShape

LIMITS = PoolLimits(2048, max_live=4)
HOST_ONLY = PoolLimits(2048, max_live=4, retained_tokens=0, host_tokens=2048)
"""What is released leaves the device at once."""
MODEL = StepModel(0.004, 0.0007, 0.006, 2e-5, 512, 0.0, row_corrections_s=((1, 0.0), (2, 0.004), (4, 0.002)))


def engine(limits=LIMITS, **speed):
    slept = []
    speed = SimulatedSpeed(**{"prefill_tokens_per_s": 100, "decode_step_s": {1: 0.01, 3: 0.03, 4: 0.1}, **speed})
    return SimulatedEngine(speed, limits, sleep=slept.append), slept


def generate(sim, prompt, count, chunk=1000):
    admission = sim.admit(prompt, count, Sampling(), ignore_eos=True)
    pending = len(prompt) - admission.reused_tokens
    tokens = []
    while len(tokens) < count:
        size = min(chunk, pending)
        sampled = sim.step([Slice(admission.handle, size)]).tokens
        pending -= size
        if sampled:
            tokens += sampled[admission.handle]
            pending = 1
    sim.release(admission.handle, retain=True)
    return tokens


def test_step_times_follow_the_table():
    speed = SimulatedSpeed(100, {1: 0.01, 3: 0.03, 4: 0.1})
    assert [speed.step_s(rows) for rows in (0, 1, 2, 3, 4)] == pytest.approx([0, 0.01, 0.02, 0.03, 0.1])
    assert speed.step_s(5) == pytest.approx(0.17)
    assert SimulatedSpeed(100, {1: 0.01}).step_s(4) == 0.01


def test_a_step_takes_its_prefill_and_its_decode_rows():
    sim, slept = engine()
    first = sim.admit(list(range(50)), 5, Sampling(), ignore_eos=True)
    sim.step([Slice(first.handle, 50)])
    second = sim.admit(list(range(100, 140)), 5, Sampling(), ignore_eos=True)
    sim.step([Slice(first.handle, 1), Slice(second.handle, 30)])
    sim.step([Slice(first.handle, 1), Slice(second.handle, 10)])
    sim.step([Slice(first.handle, 1), Slice(second.handle, 1)])
    assert slept == pytest.approx([0.5, 0.01 + 0.3, 0.01 + 0.1, 0.02])


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40), st.integers(1, 40))
def test_tokens_depend_on_the_history_alone(prompt, chunk):
    whole = generate(engine()[0], prompt, 12)
    assert generate(engine()[0], prompt, 12, chunk) == whole
    warm, _ = engine()
    generate(warm, prompt, 12)
    assert generate(warm, prompt, 12) == whole
    assert generate(engine()[0], [*prompt, *whole[:5]], 7) == whole[5:]


@given(st.lists(st.integers(0, 255), min_size=1, max_size=10), st.integers(1, 300))
def test_tokens_depend_on_the_history_alone_when_it_is_restored(pattern, length):
    prompt = (pattern * length)[:length]
    warm, _ = engine(HOST_ONLY)
    whole = generate(engine()[0], prompt, 70)
    assert generate(warm, prompt, 70) == whole
    assert generate(warm, prompt, 70) == whole
    assert generate(warm, [*prompt, *whole[:65]], 5) == whole[65:]
    warm.check_integrity()


def test_what_was_evicted_is_restored_in_no_time():
    sim, slept = engine(HOST_ONLY)
    whole, rest = 2 * BLOCK_TOKENS, BLOCK_TOKENS // 2
    prompt = [index % 251 for index in range(whole + rest)]
    generate(sim, prompt, 1)
    assert (sim.stats().used_tokens, sim.stats().host_tokens) == (0, whole)
    assert sim.probe(prompt) == whole
    slept.clear()
    admission = sim.admit(prompt, 5, Sampling(), ignore_eos=True)
    assert (admission.reused_tokens, slept) == (whole, [])
    assert (sim.stats().used_tokens, sim.stats().reserved_tokens) == (whole, rest + 5)
    sim.step([Slice(admission.handle, rest)])
    assert slept == pytest.approx([rest / 100])


def test_different_histories_go_different_ways():
    continuations = {tuple(generate(engine()[0], [first, 7, 7], 12)) for first in range(50)}
    assert len(continuations) == 50


def test_prompts_become_bytes():
    sim, _ = engine()
    assert sim.prepare(TextPrompt("né")) == [110, 195, 169]
    assert bytes(sim.prepare(ChatPrompt((ChatTurn("user", "hi"),)))) == b"user: hi\nassistant: "
    assert list(sim.prepare(TokenPrompt((1, END_TOKEN)))) == [1, END_TOKEN]
    with pytest.raises(InvalidRequest, match="vocabulary ends at 256"):
        sim.prepare(TokenPrompt((1, 257)))


def test_reported_rates_are_the_true_ones_unless_given():
    assert SimulatedSpeed(100, {1: 0.02}).rates().decode_tokens_per_s == pytest.approx(50)
    assert SimulatedSpeed(100, {1: 0.02}, 45).rates().decode_tokens_per_s == 45


def test_decode_steps_are_read_from_text():
    assert parse_decode_steps("1:3.5,4:43") == {1: 0.0035, 4: 0.043}
    for wrong in ("", "1", "1:x", "0:3", "1:-2", "1:2;3:4"):
        with pytest.raises(StartupFailed, match=r"1:3\.4,4:43"):
            parse_decode_steps(wrong)


def test_a_step_model_is_taken_at_its_word():
    slept = []
    sim = SimulatedEngine(ModelSpeed(MODEL, IsolatedRates(1000, 90)), LIMITS, sleep=slept.append)
    first = sim.admit(list(range(50)), 5, Sampling(), ignore_eos=True)
    sim.step([Slice(first.handle, 40)])
    sim.step([Slice(first.handle, 10)])
    second = sim.admit(list(range(100, 130)), 5, Sampling(), ignore_eos=True)
    sim.step([Slice(first.handle, 1), Slice(second.handle, 20)])
    sim.step([Slice(first.handle, 1), Slice(second.handle, 10)])
    sim.step([Slice(first.handle, 1), Slice(second.handle, 1)])
    shapes = [
        StepShape.of([(40, 0, 0)]),
        StepShape.of([(10, 40, 1)]),
        StepShape.of([(1, 50, 1), (20, 0, 0)]),
        StepShape.of([(1, 51, 1), (10, 20, 1)]),
        StepShape.of([(1, 52, 1), (1, 30, 1)]),
    ]
    assert slept == pytest.approx([MODEL.seconds(shape) for shape in shapes])


@pytest.mark.parametrize(
    "speed",
    [
        SimulatedSpeed(73, {1: 0.0263, 2: 0.0526}),
        SimulatedSpeed(2551, {1: 0.0034, 3: 0.035, 4: 0.0437}),
        ModelSpeed(MODEL, IsolatedRates(1000, 90)),
        ModelSpeed(StepModel(0.012, 9e-5, 1e-4, 0.0, 512, 0.0), IsolatedRates(11_700, 95)),
    ],
)
@pytest.mark.parametrize(("max_active", "step_tokens"), [(1, 64), (4, 512), (8, 25), (12, 256)])
def test_a_step_model_is_learned_from_the_samples(speed, max_active, step_tokens):
    fit = StepFit()
    for shape, seconds in speed.samples(max_active, step_tokens):
        fit.seed(shape, seconds)
    model = fit.fit()
    for rows in range(1, max_active + 1):
        for context in (20, 700):
            shape = StepShape.of([(1, context, 1)] * rows)
            assert model.seconds(shape) == pytest.approx(speed.seconds(0, shape), rel=0.02)
    chunk = StepShape.of([(step_tokens, 300, 0)])
    assert model.seconds(chunk) == pytest.approx(speed.seconds(step_tokens, chunk), rel=0.02)


def test_an_engine_can_become_slower():
    sim, slept = engine()
    first = sim.admit(list(range(50)), 5, Sampling(), ignore_eos=True)
    sim.slowdown = 3.0
    sim.step([Slice(first.handle, 50)])
    assert slept == pytest.approx([1.5])


def answer(sim, prompt, budget, *, ignore_eos=False, begun=()):
    """Tokens up to the end token or the budget, as a scheduler takes them; `begun` were generated elsewhere."""
    known, tokens = [*prompt, *begun], [*begun]
    admission = sim.admit(known, budget - len(begun), Sampling(), ignore_eos=ignore_eos, generated=len(begun))
    pending = len(known) - admission.reused_tokens
    while len(tokens) < budget and END_TOKEN not in tokens:
        tokens += sim.step([Slice(admission.handle, pending)]).tokens[admission.handle]
        pending = 1
    sim.release(admission.handle, retain=False)
    return tokens


def test_answers_are_as_long_as_they_are_told_to_be():
    sim = SimulatedEngine(
        SimulatedSpeed(100, {1: 0.01}), LIMITS, sleep=lambda _: None, answer_tokens=lambda prompt: prompt[0] or None
    )
    assert [len(answer(sim, [length, 9], 400)) for length in (1, 7, 300)] == [1 + 1, 7 + 1, 300 + 1]
    assert answer(sim, [7, 9], 400)[-1] == END_TOKEN
    assert END_TOKEN not in answer(sim, [7, 9], 7)
    assert len(answer(sim, [7, 9], 50, ignore_eos=True)) == 50
    untold = answer(sim, [0, 9], 400)
    assert untold == answer(engine()[0], [0, 9], 400)


@pytest.mark.parametrize("told", [None, 0, 4, 30])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_that_was_begun_elsewhere_goes_on_and_ends_alike(told, ignore_eos):
    """Whoever says how long answers are is asked about the prompt alone."""
    asked = []

    def answer_tokens(prompt):
        asked.append(list(prompt))
        return told

    def fresh():
        return SimulatedEngine(
            SimulatedSpeed(100, {1: 0.01}), LIMITS, sleep=lambda _: None, answer_tokens=answer_tokens
        )

    prompt, budget = [9, 8, 7], 20
    whole = answer(fresh(), prompt, budget, ignore_eos=ignore_eos)
    assert ignore_eos or told is None or len(whole) == min(told + 1, budget)
    warm = fresh()
    answer(warm, prompt, budget, ignore_eos=ignore_eos)
    for cut in range(1, len(whole)):
        for sim in (fresh(), warm):
            assert answer(sim, prompt, budget, ignore_eos=ignore_eos, begun=whole[:cut]) == whole
    assert all(asked_for == prompt for asked_for in asked)


def test_a_leap_over_an_answer_that_was_begun_elsewhere():
    sim, _ = engine()
    prompt, begun = [5] * 7, answer(engine()[0], [5] * 7, 10, ignore_eos=True)[:4]
    admission = sim.admit([*prompt, *begun], 6, Sampling(), ignore_eos=True, generated=4)
    assert sim.decode_ahead(100) == [], "its first new token is still to come"
    sim.step([Slice(admission.handle, 11)])
    assert len(sim.decode_ahead(100)) == 5


class Clock:
    def __init__(self):
        self.now_s = 0.1

    def sleep(self, seconds):
        self.now_s += seconds


def batch(speed):
    """Three requests that have their first token."""
    clock = Clock()
    sim = SimulatedEngine(speed, LIMITS, sleep=clock.sleep, answer_tokens=lambda prompt: 9)
    handles = []
    for length, ignore_eos in ((30, True), (7, False), (12, True)):
        admission = sim.admit([length] * length, 20, Sampling(), ignore_eos=ignore_eos)
        sim.step([Slice(admission.handle, length)])
        handles.append(admission.handle)
    return sim, clock, handles


@pytest.mark.parametrize(
    "speed",
    [SimulatedSpeed(100, {1: 0.01, 3: 0.03, 4: 0.1}), ModelSpeed(MODEL, IsolatedRates(1, 1))],
    ids=["table", "model"],
)
@pytest.mark.parametrize("leaps", [[9], [2, 7], [1, 1, 3, 4]])
def test_a_leap_is_so_many_steps_at_once(speed, leaps):
    leaping, clock, handles = batch(speed)
    stepping, steps_clock, _ = batch(speed)
    slices = [Slice(handle, 1) for handle in handles]
    assert len(leaping.decode_ahead(100)) == 9  # the first token is out; eight more and the end token
    tokens, single_tokens = ({handle: [] for handle in handles} for _ in range(2))
    for leap in leaps:
        leaping.leap = leap
        result = leaping.step(slices)
        assert result.steps == leap
        for handle in handles:
            tokens[handle] += result.tokens[handle]
    for _ in range(9):
        for handle, sampled in stepping.step(slices).tokens.items():
            single_tokens[handle] += sampled
    assert tokens == single_tokens
    assert tokens[handles[1]][-1] == END_TOKEN
    assert clock.now_s == steps_clock.now_s  # to the last digit
    assert leaping.stats() == stepping.stats()
    for handle in handles[::2]:  # and they go on alike
        assert leaping.step([Slice(handle, 1)]).tokens == stepping.step([Slice(handle, 1)]).tokens
    leaping.check_integrity()


def test_a_leap_ends_where_a_request_may():
    sim, _, handles = batch(SimulatedSpeed(100, {1: 0.01}))
    sim.decode_ahead(100)
    sim.leap = 50
    assert sim.step([Slice(handle, 1) for handle in handles]).steps == 9


def test_nothing_is_leapt_over_that_was_not_foreseen():
    sim, _, handles = batch(SimulatedSpeed(100, {1: 0.01}))
    slices = [Slice(handle, 1) for handle in handles]
    sim.leap = 5
    assert sim.step(slices).steps == 1
    assert sim.leap == 0
    sim.decode_ahead(5)
    late = sim.admit([200] * 10, 5, Sampling(), ignore_eos=True)
    sim.leap = 5
    assert sim.step([*slices, Slice(late.handle, 4)]).steps == 1
    assert sim.decode_ahead(5) == []


def test_an_answer_that_may_end_at_any_time_is_not_leapt_over():
    sim, _ = engine()
    admission = sim.admit([1, 2, 3], 50, Sampling(), ignore_eos=False)
    sim.step([Slice(admission.handle, 3)])
    assert len(sim.decode_ahead(100)) == 1
