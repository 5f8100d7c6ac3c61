from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend_service.kv_cells import KvCells

CAPACITY = 200


class AgainstSetsOfCells(RuleBasedStateMachine):
    """The accounting against the obvious model: the ids of the cells that each sequence references."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = KvCells(CAPACITY)
        self.new_ids = count()
        self.ids: dict[int, list[int]] = {}
        self.reserved: dict[int, int] = {}
        """Live sequences only."""

    def all_ids(self) -> set[int]:
        return {cell for ids in self.ids.values() for cell in ids}

    @rule(data=st.data(), seq=st.integers(0, 7), own_tokens=st.integers(0, 60))
    def start(self, data: st.DataObject, seq: int, own_tokens: int) -> None:
        source = data.draw(st.sampled_from([None, *sorted(self.ids)]))
        available = self.ids[source] if source is not None else []
        shared = data.draw(st.one_of(st.just(len(available)), st.integers(0, len(available))))
        if seq in self.ids:
            with pytest.raises(ValueError, match="there already"):
                self.cells.start(seq, shared_from=source, shared_tokens=shared, worst_case_tokens=shared + own_tokens)
            return
        self.cells.start(seq, shared_from=source, shared_tokens=shared, worst_case_tokens=shared + own_tokens)
        self.ids[seq] = available[:shared]
        self.reserved[seq] = own_tokens

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), tokens=st.integers(0, 30))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        seq = data.draw(st.sampled_from(sorted(self.reserved)))
        if tokens > self.reserved[seq]:
            with pytest.raises(ValueError, match="cannot grow"):
                self.cells.grow(seq, tokens)
            return
        self.cells.grow(seq, tokens)
        self.ids[seq] = self.ids[seq] + [next(self.new_ids) for _ in range(tokens)]
        self.reserved[seq] -= tokens

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.reserved)))
        self.cells.retain(seq)
        del self.reserved[seq]

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.ids)))
        used, before = self.cells.used, self.all_ids()
        self.cells.remove(seq)
        del self.ids[seq]
        self.reserved.pop(seq, None)
        assert self.cells.used == used - len(before - self.all_ids())

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.ids)))
        length = data.draw(st.integers(0, len(self.ids[seq])))
        if seq in self.reserved:
            with pytest.raises(ValueError, match="is live"):
                self.cells.truncate(seq, length)
            return
        self.cells.truncate(seq, length)
        self.ids[seq] = self.ids[seq][:length]

    @invariant()
    def adds_up(self) -> None:
        self.cells.check_integrity()
        live = {cell for seq in self.reserved for cell in self.ids[seq]}
        assert self.cells.used == len(self.all_ids())
        assert self.cells.reserved == sum(self.reserved.values())
        assert self.cells.retained == len(self.all_ids() - live)
        for seq, ids in self.ids.items():
            assert self.cells.length(seq) == len(ids)


AgainstSetsOfCells.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAgainstSetsOfCells = AgainstSetsOfCells.TestCase


def test_shared_cells_outlive_the_sequence_that_computed_them() -> None:
    cells = KvCells(100)
    cells.start(0, shared_from=None, shared_tokens=0, worst_case_tokens=50)
    cells.grow(0, 40)
    cells.start(1, shared_from=0, shared_tokens=30, worst_case_tokens=50)
    assert (cells.used, cells.reserved) == (40, 10 + 20)
    cells.remove(0)
    assert (cells.used, cells.reserved, cells.length(1)) == (30, 20, 30)
    cells.remove(1)
    assert (cells.used, cells.reserved) == (0, 0)


def test_a_source_grows_on_after_all_of_it_was_shared() -> None:
    cells = KvCells(100)
    cells.start(0, shared_from=None, shared_tokens=0, worst_case_tokens=20)
    cells.grow(0, 10)
    cells.start(1, shared_from=0, shared_tokens=10, worst_case_tokens=20)
    cells.grow(0, 5)
    cells.grow(1, 2)
    assert (cells.length(0), cells.length(1), cells.used) == (15, 12, 17)
    cells.remove(0)
    assert cells.used == 12
    cells.remove(1)
    assert cells.used == 0


def test_a_live_sequence_takes_the_prefix_of_a_retained_one_out_of_retained() -> None:
    cells = KvCells(100)
    cells.start(0, shared_from=None, shared_tokens=0, worst_case_tokens=60)
    cells.grow(0, 40)
    cells.retain(0)
    assert (cells.retained, cells.reserved) == (40, 0)
    cells.start(1, shared_from=0, shared_tokens=25, worst_case_tokens=30)
    assert cells.retained == 15
    cells.retain(1)
    assert cells.retained == 40


def test_room_may_be_made_after_the_start_that_needs_it() -> None:
    cells = KvCells(50)
    cells.start(0, shared_from=None, shared_tokens=0, worst_case_tokens=40)
    cells.grow(0, 40)
    cells.retain(0)
    cells.start(1, shared_from=0, shared_tokens=30, worst_case_tokens=50)
    cells.remove(0)
    assert (cells.used, cells.reserved) == (30, 20)


def test_many_share_points_leave_nothing_behind() -> None:
    cells = KvCells(1000)
    cells.start(0, shared_from=None, shared_tokens=0, worst_case_tokens=100)
    cells.grow(0, 100)
    for shared in range(101):
        cells.start(1, shared_from=0, shared_tokens=shared, worst_case_tokens=100)
        cells.remove(1)
    cells.check_integrity()
    assert cells._root.children == {cells._sequences[0].tail}


def test_a_cut_frees_only_what_nobody_else_references() -> None:
    cells = KvCells(100)
    cells.start(0, shared_from=None, shared_tokens=0, worst_case_tokens=50)
    cells.grow(0, 40)
    cells.start(1, shared_from=0, shared_tokens=30, worst_case_tokens=30)
    cells.retain(0)
    cells.truncate(0, 35)
    assert (cells.used, cells.retained, cells.length(0)) == (35, 5, 35)
    cells.truncate(0, 10)
    assert (cells.used, cells.retained, cells.length(0)) == (30, 0, 10)
    cells.remove(1)
    assert (cells.used, cells.retained) == (10, 10)
    cells.truncate(0, 0)
    assert (cells.used, cells.length(0)) == (0, 0)
    cells.remove(0)
    assert not cells._root.children


def test_many_cuts_leave_nothing_behind() -> None:
    cells = KvCells(1000)
    cells.start(0, shared_from=None, shared_tokens=0, worst_case_tokens=100)
    cells.grow(0, 100)
    cells.start(1, shared_from=0, shared_tokens=100, worst_case_tokens=100)
    cells.retain(0)
    for length in range(100, -1, -1):
        cells.truncate(0, length)
        cells.check_integrity()
        assert cells.used == 100
    assert cells._root.children == {cells._sequences[0].tail, cells._sequences[1].tail}


def test_wrong_use_says_what_is_wrong_and_changes_nothing() -> None:
    cells = KvCells(100)
    cells.start(0, shared_from=None, shared_tokens=0, worst_case_tokens=10)
    cells.grow(0, 6)
    with pytest.raises(ValueError, match="cannot grow by 5 tokens; it has 4 reserved"):
        cells.grow(0, 5)
    with pytest.raises(ValueError, match="cannot grow"):
        cells.grow(0, -1)
    with pytest.raises(ValueError, match="cannot share 7 tokens of sequence 0, which has 6"):
        cells.start(1, shared_from=0, shared_tokens=7, worst_case_tokens=9)
    with pytest.raises(ValueError, match="cannot share 1 tokens of sequence None"):
        cells.start(1, shared_from=None, shared_tokens=1, worst_case_tokens=9)
    with pytest.raises(ValueError, match="below the 6 shared"):
        cells.start(1, shared_from=0, shared_tokens=6, worst_case_tokens=5)
    with pytest.raises(KeyError):
        cells.remove(1)
    with pytest.raises(ValueError, match="sequence 0 is live"):
        cells.truncate(0, 6)
    with pytest.raises(KeyError):
        cells.truncate(1, 0)
    cells.retain(0)
    with pytest.raises(ValueError, match="retained already"):
        cells.retain(0)
    for length in (-1, 7):
        with pytest.raises(ValueError, match=f"cannot be cut to {length} tokens; it has 6"):
            cells.truncate(0, length)
    with pytest.raises(ValueError, match="at least 1"):
        KvCells(0)
    cells.check_integrity()
    assert (cells.used, cells.reserved, cells.retained) == (6, 0, 6)


def test_check_integrity_names_what_broke() -> None:
    cells = KvCells(100)
    cells.start(0, shared_from=None, shared_tokens=0, worst_case_tokens=10)
    cells.grow(0, 6)
    cells._sequences[0].tail.tokens = 5
    with pytest.raises(AssertionError, match="sequence 0: length 6, its segments have 5"):
        cells.check_integrity()
    cells._sequences[0].tail.tokens = 6
    cells._retained = 1
    with pytest.raises(AssertionError, match="retained is 1, the segments have 0"):
        cells.check_integrity()
