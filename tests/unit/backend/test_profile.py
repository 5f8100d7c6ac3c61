"""Calibration of an engine whose speed is known, and what is kept of it."""

from __future__ import annotations

import json

import pytest
from structlog.testing import capture_logs

from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import PoolLimits
from backend_service.profile import _FILE, STEP_TARGET_S, Calibration, ProfileStore, step_target_s
from backend_service.step_model import StepFit
from service_kit.state_files import StateFile
from service_kit.step_time import StepShape
from simulator.clock import VirtualClock


def calibrate(prefill_rate=200.0, step_s=0.02, max_active=4, step_tokens=0, kv_tokens=4096):
    clock = VirtualClock()
    speed = SimulatedSpeed(prefill_rate, {1: step_s, 4: 2 * step_s})
    engine = SimulatedEngine(speed, PoolLimits(kv_tokens, max_live=max_active), sleep=clock.sleep)
    profile = Calibration(engine, max_active=max_active, step_tokens=step_tokens, clock=clock).run()
    return profile, engine, clock


def test_rates_are_the_engines_own():
    profile, _, _ = calibrate()
    assert profile.rates.prefill_tokens_per_s == pytest.approx(200, rel=0.01)
    assert profile.rates.decode_tokens_per_s == pytest.approx(50, rel=0.01)


def test_step_budget_takes_the_target_time():
    profile, _, _ = calibrate()
    assert profile.step_tokens == pytest.approx(200 * STEP_TARGET_S, abs=1)


def test_a_device_that_prepares_itself_for_every_new_shape_is_measured_when_it_has():
    """As a GPU does."""
    clock = VirtualClock()
    seen = set()

    class Preparing(SimulatedEngine):
        def step(self, slices):
            shape = (len(slices), slices[0].tokens)
            if shape not in seen:
                seen.add(shape)
                clock.sleep(0.2)
            return super().step(slices)

    engine = Preparing(SimulatedSpeed(10_000, {1: 0.005, 4: 0.006}), PoolLimits(4096, max_live=4), sleep=clock.sleep)
    profile = Calibration(engine, max_active=4, clock=clock).run()
    assert profile.rates.prefill_tokens_per_s == pytest.approx(10_000, rel=0.02)
    assert all(seconds < 0.1 for shape, seconds in profile.steps if shape.tokens > 40 or 1 < shape.tokens == shape.rows)


def test_the_budget_counts_with_the_speed_of_large_steps():
    """A fixed cost of a step makes small ones slow; a target of four decode steps leaves room for large ones."""
    clock = VirtualClock()

    class Fixed(SimulatedEngine):
        def step(self, slices):
            clock.sleep(0.1)
            return super().step(slices)

    engine = Fixed(SimulatedSpeed(200, {1: 0.001, 4: 0.002}), PoolLimits(4096, max_live=4), sleep=clock.sleep)
    profile = Calibration(engine, max_active=4, clock=clock).run()
    assert profile.rates.prefill_tokens_per_s > 130, "measured in steps that are mostly fixed cost"
    assert profile.step_tokens > 50
    assert step_target_s(profile.rates.decode_tokens_per_s) == pytest.approx(0.404, rel=0.02)


def test_given_step_budget_is_kept():
    assert calibrate(step_tokens=100)[0].step_tokens == 100


@pytest.mark.parametrize("prefill_rate", [80, 100_000])
@pytest.mark.parametrize(("max_active", "limit_s"), [(1, 5), (4, 5), (16, 5.5), (64, 8)])
def test_it_is_bounded_in_time_and_budget(prefill_rate, max_active, limit_s):
    profile, engine, clock = calibrate(prefill_rate=prefill_rate, step_s=0.1, max_active=max_active)
    assert clock.now_s < limit_s
    assert 8 <= profile.step_tokens <= engine.info.max_step_tokens


def batches(profile):
    """Batch sizes of the pure decode steps in it."""
    return {shape.rows for shape, _ in profile.steps if shape.tokens == shape.rows}


@pytest.mark.parametrize(("max_active", "sizes"), [(1, {1}), (4, {1, 2, 4}), (6, {1, 2, 4, 6}), (16, {1, 2, 4, 8, 16})])
def test_decode_is_timed_at_powers_of_two_and_at_the_largest_batch(max_active, sizes):
    profile, _, _ = calibrate(step_s=0.01, max_active=max_active)
    assert batches(profile) == sizes
    for rows in sizes:
        times = [seconds for shape, seconds in profile.steps if shape.tokens == shape.rows == rows]
        assert len(times) >= 3
        assert times == pytest.approx([0.01 + 0.01 / 3 * (rows - 1)] * len(times), rel=0.01)


def test_where_time_is_short_the_largest_batch_goes_first():
    profile, _, _ = calibrate(prefill_rate=80, step_s=0.1, max_active=16)
    assert 16 in batches(profile)
    assert 2 not in batches(profile)


def test_batches_that_the_cache_has_no_room_for_are_left_out():
    profile, _, _ = calibrate(step_s=0.001, kv_tokens=300, max_active=16)
    assert 2 in batches(profile)
    assert 16 not in batches(profile)


def test_it_leaves_nothing_behind():
    _, engine, _ = calibrate()
    engine.check_integrity()
    assert engine.stats().used_tokens == 0
    assert engine.stats().reserved_tokens == 0


def test_a_small_cache_is_enough():
    profile, _, _ = calibrate(kv_tokens=256)
    assert profile.rates.decode_tokens_per_s == pytest.approx(50, rel=0.01)


def test_its_steps_identify_the_step_model():
    profile, _, _ = calibrate(max_active=4)
    fit = StepFit()
    for shape, seconds in profile.steps:
        fit.observe(shape, seconds)
    model = fit.fit()
    assert model is not None
    # The engine prices prefill and decode apart, which the model's shape only comes near to.
    assert model.seconds(StepShape(30, 0, 450)) == pytest.approx(0.15, rel=0.2)
    assert model.seconds(StepShape(1, 1, 200)) == pytest.approx(0.02, rel=0.2)
    assert model.seconds(StepShape(4, 4, 40)) == pytest.approx(0.04, rel=0.2)


def test_a_saved_profile_comes_back_under_its_own_key_only(tmp_path):
    profile, _, _ = calibrate()
    store = ProfileStore(tmp_path / "deep" / "er")
    assert store.load("one") is None
    store.save("one", profile)
    assert store.load("one") == profile
    assert store.load("two") is None


def read_with_warnings(store, key="one"):
    with capture_logs() as logs:
        profile = store.load(key)
    return profile, [(entry["log_level"], entry["kind"], entry["problem"]) for entry in logs]


@pytest.mark.parametrize("content", ["", "{", "{}", '{"format": 0}', "[1]"])
def test_an_unusable_file_is_as_good_as_none_and_replaced(tmp_path, content):
    store, profile = ProfileStore(tmp_path), calibrate()[0]
    path = store.save("one", profile)
    path.write_text(content)
    found, warnings = read_with_warnings(store)
    assert found is None
    assert [(level, kind) for level, kind, _ in warnings] == [("warning", "measured rates")]
    store.save("one", profile)
    assert store.load("one") == profile


def test_a_file_of_an_earlier_version_is_measured_anew(tmp_path):
    """It had no checksum."""
    store = ProfileStore(tmp_path)
    path = store.save("one", calibrate()[0])
    payload = json.loads(path.read_text())["payload"]
    path.write_text(json.dumps({"format": 3, **payload}))
    assert read_with_warnings(store) == (None, [("warning", "measured rates", "it is not a state file")])


def test_rates_that_changed_on_disk_are_not_believed(tmp_path):
    store = ProfileStore(tmp_path)
    path = store.save("one", calibrate(step_tokens=128)[0])
    path.write_text(path.read_text().replace('"step_tokens":128', '"step_tokens":129'))
    problem = "its checksum is wrong: it was changed or damaged"
    assert read_with_warnings(store) == (None, [("warning", "measured rates", problem)])


def test_a_file_under_the_name_of_another_is_not_used(tmp_path):
    store = ProfileStore(tmp_path)
    one, two = store.save("one", calibrate()[0]), store.save("two", calibrate(step_tokens=100)[0])
    one.replace(two)
    problem = "it was measured for another model, engine or settings"
    assert read_with_warnings(store, "two") == (None, [("warning", "measured rates", problem)])


def test_a_whole_file_of_other_fields_is_not_used(tmp_path):
    store = ProfileStore(tmp_path)
    path = store.save("one", calibrate()[0])
    StateFile(path, _FILE).write({"key": "one", "profile": {"rates": "high"}})
    assert read_with_warnings(store) == (None, [("warning", "measured rates", "it is not what this version writes")])


def test_where_nothing_can_be_saved_a_backend_goes_on_with_what_it_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with capture_logs() as logs:
        ProfileStore(tmp_path / "file").save("one", calibrate()[0])
    assert [(entry["event"], entry["kind"]) for entry in logs] == [("state file not written", "measured rates")]
    assert "after a restart rates are measured anew" in logs[0]["action"]
