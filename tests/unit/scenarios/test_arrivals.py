from __future__ import annotations

import random
import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseroute.scenarios.arrivals import Gamma, Gap, OnOff, Poisson, Recorded, parse_arrivals
from phaseroute.scenarios.bounds import BadScenario

PROCESSES = st.one_of(
    st.builds(Gap, st.floats(0, 10)),
    st.builds(Poisson, st.floats(0.01, 100)),
    st.builds(Gamma, st.floats(0.01, 100), st.floats(0.05, 10)),
    st.builds(OnOff, st.floats(0.01, 100), st.floats(0.1, 10), st.floats(0, 10)),
)


@given(PROCESSES, st.integers(1, 50), st.integers())
def test_arrivals_are_in_order_and_the_same_for_the_same_seed(process, count, seed):
    times_s = list(process.times(count, random.Random(seed)))
    assert len(times_s) == count
    assert times_s == sorted(times_s)
    assert times_s[0] >= 0
    assert times_s == list(process.times(count, random.Random(seed)))


@given(PROCESSES, st.integers())
def test_more_arrivals_begin_with_the_fewer(process, seed):
    few, many = (list(process.times(count, random.Random(seed))) for count in (5, 20))
    assert many[:5] == few


def test_a_gap_begins_at_nothing():
    assert list(Gap(0.05).times(3, random.Random(0))) == [0.0, 0.05, 0.1]


@pytest.mark.parametrize(("process", "cv"), [(Poisson(2.0), 1.0), (Gamma(2.0, 4.0), 4.0), (Gamma(2.0, 0.25), 0.25)])
def test_gaps_have_the_mean_and_the_variation_asked_for(process, cv):
    times_s = [0.0, *process.times(40_000, random.Random(1))]
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert statistics.fmean(gaps_s) == pytest.approx(0.5, rel=0.06)
    assert statistics.stdev(gaps_s) / statistics.fmean(gaps_s) == pytest.approx(cv, rel=0.06)


def test_nothing_arrives_while_it_is_off_and_the_rate_holds_while_it_is_on():
    process = OnOff(rate=10.0, on=3.0, off=7.0)
    times_s = list(process.times(30_000, random.Random(1)))
    assert all(at_s % 10 <= 3 + 1e-6 for at_s in times_s)
    assert 30_000 / times_s[-1] == pytest.approx(3.0, rel=0.03)


def test_recorded_arrivals_come_back_and_are_not_made_up():
    recorded = Recorded((0.0, 0.5, 2.0))
    assert list(recorded.times(2, random.Random(0))) == [0.0, 0.5]
    with pytest.raises(BadScenario, match="4 requests are asked for, but 3"):
        recorded.times(4, random.Random(0))


@pytest.mark.parametrize(
    ("text", "process"),
    [
        ("gap:0.05", Gap(0.05)),
        ("gap:gap_s=0.05", Gap(0.05)),
        ("poisson:rate=1", Poisson(1.0)),
        ("gamma:rate=1,cv=4", Gamma(1.0, 4.0)),
        ("gamma:cv=4,rate=1", Gamma(1.0, 4.0)),
        ("onoff:rate=4,on=10,off=20", OnOff(4.0, 10.0, 20.0)),
    ],
)
def test_arrivals_as_people_write_them(text, process):
    assert parse_arrivals(text) == process


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("weekly", "use one of gap:gap_s=..., poisson:rate=..., gamma:rate=...,cv=..., onoff:rate=...,on=...,off=..."),
        ("", "no known kind"),
        ("gap:-1", "gap_s is -1; give a number from 0 to 86400"),
        ("gap:soon", "gap_s is 'soon'; give a number from 0 to 86400"),
        ("poisson:nan", "give a number from 0.0001 to 1e+06"),
        ("poisson:rate=inf", "rate is inf; give a number from 0.0001 to 1e+06"),
        ("gamma:rate=1", "cv is missing; write gamma:rate=...,cv=..."),
        ("gamma:rate=1,cv=2,cv=3", "'cv=3' is not expected"),
        ("gamma:rate=1,wobble=3", "'wobble=3' is not expected"),
    ],
)
def test_wrong_arrivals_name_the_value_and_what_is_allowed(text, says):
    with pytest.raises(BadScenario) as raised:
        parse_arrivals(text)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@given(st.text(max_size=40))
def test_any_text_is_arrivals_or_a_bad_scenario(text):
    try:
        process = parse_arrivals(text)
    except BadScenario:
        return
    assert len(list(islice(process.times(1, random.Random(0)), 2))) == 1


def test_a_value_out_of_range_is_refused_however_it_comes():
    with pytest.raises(BadScenario, match=r"cv is 0; give a number from 0\.01 to 100"):
        Gamma(1.0, 0.0)
