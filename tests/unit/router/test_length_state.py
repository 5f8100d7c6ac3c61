"""What an estimator of output lengths knows, told and taken over; and the file that keeps it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from router_service.lengths import LENGTH_POLICIES, LengthFile, LengthOutcome, LengthQuery, make_lengths
from router_service.lengths.answers import WINDOW_ANSWERS, Answers
from router_service.lengths.history import MAX_GROUPS
from router_service.lengths.ratio import Ratio
from service_kit import state_files

PATIENCE_S = 10.0
LEARNING = ["history", "ratio"]


def answer(tokens, *, workload="chat", prompt=100, budget=256, ended=True):
    return LengthOutcome(workload, prompt, budget, tokens, ended)


def taught(outcomes, name="history"):
    lengths = make_lengths(name)
    for outcome in outcomes:
        lengths.observe(outcome)
    return lengths


def over_the_wire(state):
    """As a file would give it back."""
    return json.loads(json.dumps(state))


def successor(lengths):
    restored = make_lengths(lengths.name)
    assert restored.restore(over_the_wire(lengths.state()))
    return restored


def traffic(count, seed=1):
    rng = random.Random(seed)
    for _ in range(count):
        budget = rng.choice([64, 256, 1024])
        length = rng.randint(1, 2 * budget)
        yield LengthOutcome(rng.choice(["chat", "code", ""]), rng.randint(1, 9000), budget, length, length <= budget)


QUERIES = [
    LengthQuery(workload, prompt, budget, generated)
    for workload in ["chat", "code", "", "never seen"]
    for prompt in [1, 100, 5000, 10**6]
    for budget, generated in [(256, 0), (256, 30), (4096, 0), (4096, 700)]
]


def predictions(lengths):
    return [lengths.expected(query) for query in QUERIES]


# What is told and taken over


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("count", [1, 63, 800])
def test_a_successor_predicts_what_its_predecessor_did(name, count):
    lengths = taught(traffic(count), name)
    lengths.observe(answer(40, workload="one that is counted at once", prompt=7))
    restored = successor(lengths)
    assert predictions(restored) == predictions(lengths) != predictions(make_lengths(name))
    assert restored.state() == lengths.state()


def test_it_learns_on_as_its_predecessor_would():
    """The oldest answers of a full window go first there too."""
    lengths = taught([*[answer(200)] * WINDOW_ANSWERS, *[answer(20)] * 100])
    restored = successor(lengths)
    for _ in range(WINDOW_ANSWERS - 100):
        lengths.observe(answer(20))
        restored.observe(answer(20))
    for each in (lengths, restored):
        assert each.expected(LengthQuery("chat", 100, 4096)) == pytest.approx(20, rel=0.1)
    assert restored.state() == lengths.state()


def test_the_group_without_an_answer_for_longest_is_still_the_first_to_go():
    lengths = taught([answer(10, workload="old")] * 100)
    for label in range(MAX_GROUPS // 2 - 1):
        lengths.observe(answer(200, workload=f"label {label}"))
    restored = successor(lengths)
    restored.observe(answer(200, workload="one more"))
    old, unknown = (LengthQuery(workload, 100, 256) for workload in ("old", "never seen"))
    assert lengths.expected(old) == pytest.approx(10, abs=1)
    assert restored.expected(old) == restored.expected(unknown)


@pytest.mark.parametrize("name", LEARNING)
def test_what_was_asked_before_is_asked_again_after(name):
    restored = taught([answer(5)], name)
    version, before = restored.version, predictions(restored)
    assert restored.restore(over_the_wire(taught([answer(200)] * 50, name).state()))
    assert restored.version > version
    assert predictions(restored) != before


@pytest.mark.parametrize("name", LENGTH_POLICIES)
def test_one_that_has_learnt_nothing_has_nothing_to_tell(name):
    assert make_lengths(name).state() == {}


def test_what_it_tells_is_bounded_whatever_clients_call_their_requests():
    lengths = make_lengths("history")
    for label in range(MAX_GROUPS):
        lengths.observe(answer(2**40, workload=f"{label}".ljust(256, "\0"), budget=2**41))
        for prompt in (1, 2):
            for _ in range(3):
                lengths.observe(answer(2**40, workload=f"{label}".ljust(256, "\0"), prompt=prompt, budget=2**41))
    size = len(json.dumps(lengths.state()))
    full = len(Answers.encoded(taught([answer(9)] * WINDOW_ANSWERS)._all))
    assert size + MAX_GROUPS * full < state_files.MOST_BYTES / 2
    assert successor(lengths).state() == lengths.state()


EVERY = taught([answer(50)] * 3).state()


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        "state",
        {**EVERY, "format": 2},
        {**EVERY, "format": "1"},
        {**EVERY, "all": 7},
        {**EVERY, "all": "no base64"},
        {**EVERY, "all": "é"},
        {**EVERY, "all": ""},
        {**EVERY, "all": "AAAA"},
        {**EVERY, "all": "AAAAAA=="},
        {**EVERY, "all": "AQAAAA==" * 2},
        {**EVERY, "groups": {}},
        {**EVERY, "groups": [[]]},
        {**EVERY, "groups": [["chat", 99, EVERY["all"]]]},
        {**EVERY, "groups": [["chat", -2, EVERY["all"]]]},
        {**EVERY, "groups": [["x" * 257, 1, EVERY["all"]]]},
        {**EVERY, "groups": [["chat", 1, EVERY["all"]]] * 2},
        {**EVERY, "groups": [["chat", 1, None]]},
        {**EVERY, "groups": [[f"{label}", 1, EVERY["all"]] for label in range(MAX_GROUPS + 1)]},
        {"format": 1, "ratio": 2.0},
        {"format": 1, "ratio": 0.0},
        {"format": 1, "ratio": float("nan")},
        {"format": 1, "ratio": "0.5"},
        {"format": 2, "ratio": 0.5},
    ],
)
@pytest.mark.parametrize("name", LENGTH_POLICIES)
def test_nonsense_is_refused_and_changes_nothing(name, state):
    lengths = taught(traffic(20), name)
    before, version = lengths.state(), lengths.version
    assert not lengths.restore(state)
    assert (lengths.state(), lengths.version) == (before, version)


texts = st.text(max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | texts | st.sampled_from(["AQAAAA==", EVERY["all"]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=8,
)
nearly = st.fixed_dictionaries(
    {"format": st.sampled_from([1, 1, 1.0, True, None])},
    optional={
        "all": json_values,
        "groups": st.lists(st.tuples(texts, st.integers(-3, 25), json_values).map(list) | json_values, max_size=3),
        "ratio": json_values,
    },
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(LENGTH_POLICIES)), nearly | json_values)
def test_whatever_is_taken_over_leaves_estimates_within_their_bounds(name, state):
    lengths = make_lengths(name)
    lengths.restore(state)
    lengths.observe(answer(30))
    for query in QUERIES:
        assert 1 <= lengths.expected(query) <= query.budget_tokens


# The file


async def kept(lengths, directory: Path, **options) -> None:
    """A router's life in which nothing happens."""
    async with asyncio.timeout(PATIENCE_S), LengthFile(lengths, directory, **options):
        pass


@pytest.mark.parametrize("name", LEARNING)
async def test_a_restarted_router_predicts_what_it_did_before(tmp_path, name):
    before, after = make_lengths(name), make_lengths(name)
    async with LengthFile(before, tmp_path) as file:
        for outcome in traffic(300):
            before.observe(outcome)
        assert not file.path.exists(), "on the way to the disk nothing waits"
    async with LengthFile(after, tmp_path):
        assert after.state() == before.state()
        assert predictions(after) != predictions(make_lengths(name))
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


async def test_estimators_keep_apart(tmp_path):
    await kept(taught(traffic(30), "history"), tmp_path)
    await kept(taught(traffic(30), "ratio"), tmp_path)
    lengths = make_lengths("history")
    await kept(lengths, tmp_path)
    assert lengths.state() == taught(traffic(30), "history").state()


async def test_one_that_learns_nothing_leaves_no_file(tmp_path):
    await kept(taught(traffic(30), "budget"), tmp_path)
    await kept(make_lengths("history"), tmp_path)
    assert list(tmp_path.iterdir()) == []


async def until(condition) -> None:
    for _ in range(int(PATIENCE_S / 0.001)):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


async def test_it_is_saved_while_the_router_runs_too(tmp_path):
    """What a killed router leaves behind."""
    lengths = make_lengths("history")
    async with LengthFile(lengths, tmp_path, every_s=0.001) as file:
        lengths.observe(answer(50))
        await until(file.path.exists)
        successor = make_lengths("history")
        assert successor.restore(file._file.read())
        assert predictions(successor) == predictions(lengths)


class Watched(Ratio):
    """Counts how often it was asked whether something has changed, and what it has learnt."""

    asked = told = 0

    @property
    def version(self):
        self.asked += 1
        return self._version

    @version.setter
    def version(self, value):
        self._version = value

    def state(self):
        self.told += 1
        return super().state()


async def test_what_has_not_changed_is_not_written_again(tmp_path):
    lengths = Watched()
    async with LengthFile(lengths, tmp_path, every_s=0.001):
        lengths.observe(answer(50))
        await until(lambda: lengths.told == 1)
        asked = lengths.asked
        await until(lambda: lengths.asked > asked + 20)
        assert lengths.told == 1


async def test_answers_that_change_no_estimate_yet_are_saved_at_the_end(tmp_path):
    lengths = taught([answer(50)] * 100)
    async with LengthFile(lengths, tmp_path):
        version = lengths.version
        lengths.observe(answer(200))
        assert lengths.version == version
    restored = make_lengths("history")
    await kept(restored, tmp_path)
    assert restored.state() == lengths.state()


def cut(path: Path) -> None:
    os.truncate(path, 40)


def of_another_version(path: Path) -> None:
    file = LengthFile(make_lengths("history"), path.parent)._file
    assert file.write({"format": 2, "all": []})


@pytest.mark.parametrize(
    ("harm", "says"), [(cut, "it is cut short or no JSON"), (of_another_version, "it is not what this version writes")]
)
async def test_with_a_damaged_file_a_router_starts_from_nothing_and_says_so(tmp_path, harm, says):
    await kept(taught(traffic(30)), tmp_path)
    harm(tmp_path / "lengths-history.json")
    lengths = make_lengths("history")
    with capture_logs() as logs:
        async with LengthFile(lengths, tmp_path):
            assert predictions(lengths) == predictions(make_lengths("history"))
            lengths.observe(answer(50))
    assert [(entry["log_level"], entry["kind"], entry["problem"]) for entry in logs] == [
        ("warning", "output lengths (history)", says)
    ]
    restored = make_lengths("history")
    await kept(restored, tmp_path)
    assert restored.state() == lengths.state(), "the damaged file was replaced"


async def test_a_full_disk_stops_nothing_and_is_warned_of_once(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        tries.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tries: list[int] = []
    monkeypatch.setattr(state_files.os, "fsync", full)
    lengths = make_lengths("history")
    with capture_logs() as logs:
        async with LengthFile(lengths, tmp_path, every_s=0.001):
            for count in range(1, 4):
                lengths.observe(answer(50))
                await until(lambda count=count: len(tries) >= count)
    assert [(entry["log_level"], entry["problem"]) for entry in logs] == [("warning", "No space left on device")]
    assert list(tmp_path.iterdir()) == []


async def test_the_event_loop_runs_while_the_disk_is_slow(tmp_path, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()

    def slow(_descriptor: int) -> None:
        writing.set()
        assert go_on.wait(PATIENCE_S)

    monkeypatch.setattr(state_files.os, "fsync", slow)
    lengths = make_lengths("history")
    async with LengthFile(lengths, tmp_path, every_s=0.001) as file:
        lengths.observe(answer(50))
        await until(writing.is_set)  # which this loop could not do if it were held up
        lengths.observe(answer(60))
        go_on.set()
    restored = make_lengths("history")
    assert restored.restore(file._file.read())
    assert restored.state() == lengths.state(), "the last save is the last to be written"
