from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_service.engines.simulated import ModelSpeed, SimulatedSpeed
from backend_service.step_model import IsolatedRates, KnownStepTimes
from phaseroute.v1 import inference_pb2 as pb
from service_kit.step_time import StepModel, StepShape
from simulator.article import CPU_DECODE_STEP_S, GPU_DECODE_STEP_S
from simulator.backend import BackendRules, VirtualBackend
from simulator.devices import DEVICES, FLEETS, WIDE_SPREAD, fleet, scaled
from simulator.fleet import step_models
from simulator.profile_file import load_profiles, save_profiles
from simulator.profiles import BadProfile, Profile, profile_of_status

MODEL = StepModel(0.003, 0.0011, 0.007, 3e-5, 512, 0.001, row_corrections_s=((1, 0.0), (2, 0.005)))
PROFILE = Profile(
    ModelSpeed(MODEL, IsolatedRates(800, 85)),
    max_active=6,
    kv_tokens=4096,
    step_tokens=128,
    step_target_s=0.15,
    scheduling="priority",
    source="a test",
)


def status_of(profile: Profile) -> pb.BackendStatus:
    """As a simulated backend publishes it before its first request."""
    assert isinstance(profile.speed, ModelSpeed)
    times = KnownStepTimes(profile.speed.model)
    published = VirtualBackend("b", profile, rules=BackendRules(), make_times=lambda: times).status(0.0)
    assert published is not None
    return published.status


def test_a_profile_read_off_a_status_is_the_backends_own():
    read = profile_of_status(status_of(PROFILE))
    assert replace(read, source="a test") == PROFILE
    assert read.source == "Status of simulated on simulated, 800 prefill and 85 decode tok/s alone, simulated"


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ("isolated_rates", "no usable isolated rates; start it with --measure"),
        ("step_model", "no usable step model yet; start it with --measure, or send it some requests"),
        ("kv_cache", "does not tell the size of its KV cache"),
    ],
)
def test_a_status_that_tells_too_little_is_refused_with_a_remedy(without, says):
    status = status_of(PROFILE)
    status.ClearField(without)
    with pytest.raises(BadProfile) as raised:
        profile_of_status(status)
    assert says in str(raised.value)


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
def test_a_status_of_nonsense_is_refused(value):
    status = status_of(PROFILE)
    status.step_model.base_s = value
    with pytest.raises(BadProfile):
        profile_of_status(status)
    status = status_of(PROFILE)
    status.isolated_rates.prefill_tokens_per_s = value
    with pytest.raises(BadProfile):
        profile_of_status(status)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_active": 0}, "max_active is 0; give 1 to 4096"),
        ({"kv_tokens": 0}, "kv_tokens is 0; give 1 to"),
        ({"step_tokens": -1}, "step_tokens is -1; give 1 to"),
        ({"step_target_s": 0.0}, "step_target_s is 0.0; give seconds above 0"),
        ({"step_target_s": math.nan}, "step_target_s is nan; give seconds above 0"),
        ({"scheduling": "lifo"}, "scheduling is 'lifo'; use one of fair, fcfs, shortest_prefill_first, priority"),
    ],
)
def test_a_profile_that_no_backend_can_have_is_refused_with_what_is_allowed(change, says):
    with pytest.raises(BadProfile) as raised:
        replace(PROFILE, **change)
    assert says in str(raised.value)


def test_profiles_in_a_file_come_back_to_the_last_digit(tmp_path):
    profiles = {**DEVICES, "mine": PROFILE}
    save_profiles(tmp_path / "p.json", profiles)
    assert load_profiles(tmp_path / "p.json") == profiles


def test_a_file_may_leave_out_what_has_a_default(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('{"a": {"speed": {"kind": "table", "prefill_tokens_per_s": 100, "decode_step_s": {"1": 0.01}}}}')
    assert load_profiles(path) == {"a": Profile(SimulatedSpeed(100, {1: 0.01}))}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda entry: entry["speed"].update(base_s=-1), "b.speed.step_model.base_s: Input should be greater"),
        (lambda entry: entry["speed"].update(kind="guess"), "'table', 'step_model'"),
        (lambda entry: entry["speed"].update(row_corrections_s=[[2, 0], [1, 0]]), "is not rising in rows"),
        (lambda entry: entry["speed"].pop("per_token_s"), "b.speed.step_model.per_token_s: Field required"),
        (lambda entry: entry.update(max_active=0), "b: max_active is 0; give 1 to 4096"),
        (lambda entry: entry.update(color="red"), "b.color: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_what_is_allowed(tmp_path, change, says):
    path = tmp_path / "p.json"
    save_profiles(path, {"b": PROFILE})
    entries = json.loads(path.read_text())
    change(entries["b"])
    path.write_text(json.dumps(entries))
    with pytest.raises(BadProfile) as raised:
        load_profiles(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert says in str(raised.value)


@given(st.binary(max_size=100))
def test_any_bytes_are_profiles_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "p.json"
    path.write_bytes(content)
    with pytest.raises(BadProfile):
        load_profiles(path)


def test_files_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(BadProfile, match="cannot be read"):
        load_profiles(tmp_path / "nowhere.json")
    with pytest.raises(BadProfile, match="cannot be written"):
        save_profiles(tmp_path / "no" / "where.json", {"b": PROFILE})


@pytest.mark.parametrize("name", FLEETS)
def test_every_fleet_is_there_and_has_step_models(name):
    backends = fleet(name)
    assert set(step_models(backends)) == set(FLEETS[name]) == set(backends)
    assert all(profile.source for profile in backends.values())


def test_the_device_in_between_is_between_in_every_figure():
    speed = DEVICES["npu"].speed
    assert isinstance(speed, SimulatedSpeed)
    assert 73 < speed.prefill_tokens_per_s < 2551
    for rows, cpu_s, gpu_s in ((1, CPU_DECODE_STEP_S[1], GPU_DECODE_STEP_S[1]), (4, None, GPU_DECODE_STEP_S[4])):
        assert gpu_s < speed.step_s(rows) < (cpu_s or 4 * CPU_DECODE_STEP_S[1])


@pytest.mark.parametrize(
    ("device", "rows", "context", "measured_s"),
    [
        ("llama", 1, 64, 0.0125),
        ("llama", 4, 64, 0.0418),
        ("llama", 4, 1500, 0.0947),
        ("mlx", 1, 100, 0.138),
        ("mlx", 4, 100, 0.174),
        ("mlx", 8, 100, 0.226),
        ("h200", 1, 24, 0.0055),
        ("h200", 32, 24, 0.0080),
    ],
)
def test_measured_devices_take_what_was_measured(device, rows, context, measured_s):
    shape = StepShape.of([(1, context, 1)] * rows)
    assert DEVICES[device].speed.seconds(0, shape) == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize("device", ["gpu", "llama"])
def test_a_device_twice_as_fast_takes_half_the_time(device):
    profile = DEVICES[device]
    fast = scaled(profile, 2.0)
    for prefill, shape in ((0, StepShape.of([(1, 300, 1)] * 3)), (100, StepShape.of([(100, 20, 1)]))):
        assert fast.speed.seconds(prefill, shape) == pytest.approx(profile.speed.seconds(prefill, shape) / 2)
    rates, fast_rates = profile.speed.rates(), fast.speed.rates()
    assert fast_rates.prefill_tokens_per_s == pytest.approx(2 * rates.prefill_tokens_per_s)
    assert fast_rates.decode_tokens_per_s == pytest.approx(2 * rates.decode_tokens_per_s)


def test_a_wide_fleet_has_as_many_backends_of_few_kinds_and_is_drawn_by_the_seed():
    backends = fleet("wide:100", seed=3)
    assert len(backends) == 100
    kinds = {id(profile): profile for profile in backends.values()}
    assert len(kinds) == 20
    rates = [kind.speed.rates().prefill_tokens_per_s for name, kind in backends.items() if name.startswith("cpu-")]
    assert all(73 / WIDE_SPREAD <= rate <= 73 * WIDE_SPREAD for rate in rates)
    assert backends == fleet("wide:100", seed=3)
    assert backends != fleet("wide:100", seed=4)


@pytest.mark.parametrize("name", ["", "wide", "wide:", "wide:0", "wide:10001", "wide:x", "gpus"])
def test_an_unknown_fleet_is_refused_with_what_there_is(name):
    with pytest.raises(
        BadProfile, match=r"use one of article, article3, mixed, h200, wide:N|give wide:1 to wide:10000"
    ):
        fleet(name)
