"""The pool's books under random use, and the promises it makes to engines."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend_service.kv_pool import KvPool, PoolLimits

LIMITS = PoolLimits(capacity_tokens=64, max_live=3, max_retained=4, retained_tokens=24)


def grown(pool, tokens, max_new_tokens=4):
    placement = pool.place(tokens, max_new_tokens)
    pool.grow(placement.handle, tokens[placement.reused_tokens :])
    return placement


def test_probe_says_what_place_shares_and_never_the_whole_prompt():
    pool = KvPool(LIMITS)
    tokens = list(range(10))
    assert pool.probe(tokens) == 0
    grown(pool, tokens)
    assert pool.probe(tokens) == 9
    assert pool.probe(tokens[:5]) == 4
    assert pool.probe([*tokens[:6], 99]) == 6
    placement = pool.place(tokens, 4)
    assert placement.reused_tokens == 9
    assert placement.source is not None


def test_full_batch_is_refused():
    pool = KvPool(LIMITS)
    for start in range(3):
        grown(pool, [start * 10])
    assert pool.place([99], 1) is None


def test_retained_sequences_give_way_to_live_ones_oldest_first():
    pool = KvPool(PoolLimits(capacity_tokens=40, max_live=3, max_retained=4, retained_tokens=40))
    old = grown(pool, list(range(10))).handle
    pool.release(old, retain=True)
    young = grown(pool, list(range(100, 110))).handle
    pool.release(young, retain=True)
    placement = pool.place(list(range(200, 220)), 5)
    assert placement.dropped == (old,)
    pool.check_integrity()


def test_a_shared_retained_source_may_be_dropped_and_the_prefix_survives():
    pool = KvPool(PoolLimits(capacity_tokens=20, max_live=3, max_retained=4, retained_tokens=20))
    source = grown(pool, list(range(12)), max_new_tokens=0).handle
    pool.release(source, retain=True)
    placement = pool.place([*range(8), 90, 91], 10)
    assert placement.source == source
    assert placement.reused_tokens == 8
    assert placement.dropped == (source,)
    assert pool.probe(list(range(12))) == 8
    pool.check_integrity()


def test_retained_cells_are_bounded():
    pool = KvPool(LIMITS)
    for start in range(0, 60, 10):
        handle = grown(pool, list(range(start * 10, start * 10 + 10))).handle
        pool.release(handle, retain=True)
        assert pool.use().retained_tokens <= LIMITS.retained_tokens
        pool.check_integrity()


def test_models_that_cannot_be_cut_share_nothing():
    pool = KvPool(LIMITS, share=False)
    handle = grown(pool, list(range(10))).handle
    assert pool.probe(list(range(10))) == 0
    assert pool.release(handle, retain=True) == (handle,)
    assert pool.use().used_tokens == 0


class PoolMachine(RuleBasedStateMachine):
    """Every placement is honoured: what was promised can always be computed, and probes tell the truth."""

    def __init__(self):
        super().__init__()
        self.pool = KvPool(LIMITS)
        self.pending: dict[int, list[int]] = {}
        self.budget: dict[int, int] = {}

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20), max_new=st.integers(1, 12))
    def place(self, tokens, max_new):
        expected = self.pool.probe(tokens)
        placement = self.pool.place(tokens, max_new)
        if placement is None:
            return
        assert placement.reused_tokens == expected < len(tokens)
        self.pending[placement.handle] = tokens[placement.reused_tokens :]
        self.budget[placement.handle] = max_new

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def grow(self, data):
        handle = data.draw(st.sampled_from(sorted(self.pending)))
        pending = self.pending[handle]
        count = data.draw(st.integers(1, max(1, len(pending))))
        if pending:
            self.pool.grow(handle, pending[:count])
            del pending[:count]
        elif self.budget[handle]:
            self.pool.grow(handle, [data.draw(st.integers(0, 2))])
            self.budget[handle] -= 1

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), retain=st.booleans())
    def release(self, data, retain):
        handle = data.draw(st.sampled_from(sorted(self.pending)))
        del self.pending[handle], self.budget[handle]
        self.pool.release(handle, retain=retain)

    @rule()
    def clear(self):
        self.pool.clear()
        self.pending.clear()
        self.budget.clear()
        assert self.pool.use().used_tokens == 0

    @invariant()
    def books_agree(self):
        self.pool.check_integrity()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
