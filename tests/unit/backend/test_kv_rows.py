"""Accounting of a padded batch of copies."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend_service.kv_rows import KvRows


class AgainstLists(RuleBasedStateMachine):
    """Against the obvious model: (length, worst case, live) of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = KvRows(1000)
        self.model: dict[int, tuple[int, int, bool]] = {}

    @rule(data=st.data(), seq=st.integers(0, 5), own=st.integers(0, 60))
    def start(self, data: st.DataObject, seq: int, own: int) -> None:
        source = data.draw(st.sampled_from([None, *sorted(self.model)]))
        shared = data.draw(st.integers(0, self.model[source][0] if source is not None else 0))
        if seq in self.model:
            with pytest.raises(ValueError, match="there already"):
                self.rows.start(seq, shared_from=source, shared_tokens=shared, worst_case_tokens=shared + own)
            return
        self.rows.start(seq, shared_from=source, shared_tokens=shared, worst_case_tokens=shared + own)
        self.model[seq] = (shared, shared + own, True)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tokens=st.integers(0, 40))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        length, worst, live = self.model[seq]
        if live and length + tokens <= worst:
            self.rows.grow(seq, tokens)
            self.model[seq] = (length + tokens, worst, live)
        elif tokens:
            with pytest.raises(ValueError, match="cannot grow"):
                self.rows.grow(seq, tokens)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        length, worst, live = self.model[seq]
        if not live:
            with pytest.raises(ValueError, match="retained already"):
                self.rows.retain(seq)
            return
        self.rows.retain(seq)
        self.model[seq] = (length, worst, False)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), length=st.integers(0, 120))
    def truncate(self, data: st.DataObject, length: int) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        had, worst, live = self.model[seq]
        if live or length > had:
            with pytest.raises(ValueError, match=str(seq)):
                self.rows.truncate(seq, length)
            return
        self.rows.truncate(seq, length)
        self.model[seq] = (length, worst, live)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        self.rows.remove(seq)
        del self.model[seq]

    @invariant()
    def totals(self) -> None:
        live = [(length, worst) for length, worst, is_live in self.model.values() if is_live]
        idle = [length for length, _, is_live in self.model.values() if not is_live]
        rectangle = len(live) * max((worst for _, worst in live), default=0)
        assert self.rows.retained == sum(idle)
        assert self.rows.used == sum(idle) + sum(length for length, _ in live)
        assert self.rows.used - self.rows.retained + self.rows.reserved == rectangle
        self.rows.check_integrity()


AgainstLists.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstLists = AgainstLists.TestCase


def test_a_short_row_beside_a_long_one_is_as_long():
    rows = KvRows(100)
    rows.start(1, shared_from=None, shared_tokens=0, worst_case_tokens=40)
    assert rows.reserved == 40
    rows.start(2, shared_from=None, shared_tokens=0, worst_case_tokens=10)
    assert rows.reserved == 80
    rows.grow(1, 30)
    assert (rows.used, rows.reserved) == (30, 50)
    rows.retain(1)
    assert (rows.used, rows.retained, rows.reserved) == (30, 30, 10)


def test_a_copy_counts_again():
    rows = KvRows(100)
    rows.start(1, shared_from=None, shared_tokens=0, worst_case_tokens=20)
    rows.grow(1, 20)
    rows.start(2, shared_from=1, shared_tokens=15, worst_case_tokens=20)
    assert (rows.used, rows.length(2)) == (35, 15)
    with pytest.raises(ValueError, match="cannot share 21 tokens"):
        rows.start(3, shared_from=1, shared_tokens=21, worst_case_tokens=30)
    with pytest.raises(ValueError, match="below the 5 shared ones"):
        rows.start(3, shared_from=1, shared_tokens=5, worst_case_tokens=4)


def test_an_empty_cache_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        KvRows(0)
