from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_service.settings import BackendSettings
from phaseroute.local import plan as plans
from phaseroute.local.plan import BadPlan, load_plan, make_plan, mixed_pair, plan_of_flags, unequal_pair
from router_service.settings import RouterSettings

PAIR = """
[router]
listen = "0.0.0.0:50099"
policy = "round_robin"

[backends.fast]
engine = "simulated"
max_active = 8
measure = true
listen = "127.0.0.1:50077"

[backends.small]
engine = "simulated"
measure = false

[backends.far]
target = "gpu-box:50061"
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> Path:
        path = tmp_path / "phaseroute.toml"
        path.write_text(text)
        return path

    return write_file


def test_a_file_becomes_flags_that_the_services_take(write):
    plan = load_plan(write(PAIR))
    assert [service.name for service in plan.backends] == ["fast", "small"]
    fast, small = (BackendSettings.load(service.arguments) for service in plan.backends)
    assert (fast.engine, fast.max_active, fast.measure, fast.listen) == ("simulated", 8, True, "127.0.0.1:50077")
    assert small.measure is False
    router = RouterSettings.load(plan.router.arguments)
    assert (router.listen, router.policy) == ("0.0.0.0:50099", "round_robin")
    assert router.targets == {"fast": "127.0.0.1:50077", "small": small.listen, "far": "gpu-box:50061"}
    assert plan.router.address == "127.0.0.1:50099"


def test_the_port_on_the_command_line_wins(write):
    plan = load_plan(write(PAIR), port=50111)
    assert RouterSettings.load(plan.router.arguments).listen == "0.0.0.0:50111"


def test_backends_without_an_address_get_ports_of_their_own():
    plan = make_plan({"a": {}, "b": {}, "c": {}}, {})
    assert len({service.address for service in plan.backends} | {plan.router.address}) == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no backend"),
        ("[backends]", "names no backend"),
        ("[router]\nport = 1", "names no backend"),
        ("backends = 3", "names no backend"),
        ("[backends]\nfast = 3", r"backends\.fast is not a table"),
        ("[backend.fast]", r"has a \[backend\]"),
        ("[backends.fast", "not valid TOML"),
        ('[backends.fast]\ntarget = "h:1"\nthreads = 2', "remove its other keys"),
    ],
)
def test_a_bad_file_is_explained(write, text: str, says: str):
    with pytest.raises(BadPlan, match=says):
        load_plan(write(text))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(BadPlan, match=r"none\.toml cannot be read"):
        load_plan(tmp_path / "none.toml")


def test_flags_are_passed_on_and_everything_gets_a_port_of_its_own():
    plan = plan_of_flags({"gpu": ("--engine", "mlx", "--max-active", "32"), "cpu": ()})
    gpu, cpu = (BackendSettings.load(service.arguments) for service in plan.backends)
    assert (gpu.engine, gpu.max_active, gpu.listen) == ("mlx", 32, plan.backends[0].address)
    router = RouterSettings.load(plan.router.arguments)
    assert router.targets == {"gpu": gpu.listen, "cpu": cpu.listen}
    assert len({gpu.listen, cpu.listen, router.listen}) == 3


@pytest.mark.parametrize("pair_of", [unequal_pair, mixed_pair])
@given(cores=st.sets(st.integers(0, 200), min_size=1))
def test_threads_of_a_pair_never_outnumber_their_cores(pair_of, cores: set[int]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "usable_cores", lambda: sorted(cores))
        patch.setattr(plans, "can_pin", lambda: True)
        pair = pair_of()
    first, second = ({int(core) for core in settings["cpus"].split(",")} for settings in pair.values())
    for settings, pinned in zip(pair.values(), (first, second), strict=True):
        assert settings["threads"] == len(pinned)
        assert pinned <= cores
    assert len(cores) == 1 or not first & second
    assert len(cores) == 1 or max(cores) not in first


@given(cores=st.sets(st.integers(0, 200), min_size=3))
def test_engines_are_given_equal_parts_and_leave_a_core_to_the_router(cores: set[int]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "usable_cores", lambda: sorted(cores))
        patch.setattr(plans, "can_pin", lambda: True)
        llama, mlx = mixed_pair().values()
    assert llama["threads"] == mlx["threads"]
    assert str(max(cores)) not in f"{llama['cpus']},{mlx['cpus']}".split(",")


def test_without_pinning_no_core_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plans, "can_pin", lambda: False)
    for pair in (unequal_pair(), mixed_pair()):
        assert all("cpus" not in settings for settings in pair.values())


def test_the_pairs_are_what_backends_take():
    engines = [
        [BackendSettings.load(service.arguments).engine for service in make_plan(pair, {}).backends]
        for pair in (unequal_pair(), mixed_pair())
    ]
    assert engines == [["llama_cpp", "llama_cpp"], ["llama_cpp", "mlx"]]
