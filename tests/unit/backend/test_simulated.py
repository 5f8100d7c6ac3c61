"""The simulated engine: its times, its tokens, its settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_service.engines.base import Slice
from backend_service.engines.simulated import END_TOKEN, SimulatedEngine, SimulatedSpeed, parse_decode_steps
from backend_service.host_tier import BLOCK_TOKENS
from backend_service.kv_pool import PoolLimits
from service_kit.faults import InvalidRequest, StartupFailed
from service_kit.requests import ChatPrompt, ChatTurn, Sampling, TextPrompt, TokenPrompt

LIMITS = PoolLimits(2048, max_live=4)
HOST_ONLY = PoolLimits(2048, max_live=4, retained_tokens=0, host_tokens=2048)
"""What is released leaves the device at once."""


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
