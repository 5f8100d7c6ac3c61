"""The pool's books under random use, and the promises it makes to engines."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend_service import retention
from backend_service.host_tier import BLOCK_TOKENS, MIN_RESTORE_TOKENS, blocks_of
from backend_service.kv_pool import Eviction, KvPool, PoolLimits

LIMITS = PoolLimits(capacity_tokens=64, max_live=3, max_retained=4, retained_tokens=24)
WITH_HOST = PoolLimits(capacity_tokens=1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=1000)
"""Nothing is retained on the device: all goes to the host at once."""


def grown(pool, tokens, max_new_tokens=4):
    placement = pool.place(tokens, max_new_tokens)
    pool.grow(placement.handle, tokens[placement.reused_tokens :])
    return placement


def generated(pool, tokens, output):
    """A sequence with its output, still live."""
    handle = grown(pool, tokens, len(output)).handle
    pool.grow(handle, output)
    return handle


def stash(pool, evictions, payload=None):
    for eviction in evictions:
        for block in eviction.save:
            pool.stash(block, payload)


def saved(evictions):
    return [(block.start, block.end) for eviction in evictions for block in eviction.save]


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


def test_retained_prompts_give_way_to_live_sequences_oldest_first():
    pool = KvPool(PoolLimits(capacity_tokens=40, max_live=3, max_retained=4, retained_tokens=40))
    old = grown(pool, list(range(10))).handle
    pool.release(old, retain=True)
    young = grown(pool, list(range(100, 110))).handle
    pool.release(young, retain=True)
    placement = pool.place(list(range(200, 220)), 5)
    assert placement.evicted == (Eviction(old, 0, ()),)
    pool.check_integrity()


def test_outputs_give_way_before_older_prompts():
    pool = KvPool(PoolLimits(capacity_tokens=60, max_live=3, max_retained=4, retained_tokens=60))
    old = generated(pool, list(range(10)), [50] * 10)
    pool.release(old, retain=True)
    young = generated(pool, list(range(100, 110)), [51] * 10)
    pool.release(young, retain=True)
    placement = pool.place(list(range(200, 230)), 5)
    assert placement.evicted == (Eviction(old, 10, ()), Eviction(young, 10, ()))
    assert pool.probe([*range(10), 50]) == 10
    pool.check_integrity()


def test_only_one_of_those_that_share_a_prefix_keeps_it():
    pool = KvPool(PoolLimits(capacity_tokens=40, max_live=3, max_retained=4, retained_tokens=40))
    first = grown(pool, [*range(10), *range(20, 30)], 0).handle
    second = grown(pool, [*range(10), *range(30, 40)], 0).handle
    pool.release(first, retain=True)
    pool.release(second, retain=True)
    placement = pool.place(list(range(100, 120)), 5)
    assert placement.evicted == (Eviction(first, 0, ()), Eviction(second, 10, ()))
    assert pool.probe([*range(10), 99]) == 10
    pool.check_integrity()


def test_a_shared_retained_source_may_be_dropped_and_the_prefix_survives():
    pool = KvPool(PoolLimits(capacity_tokens=20, max_live=3, max_retained=4, retained_tokens=20))
    source = grown(pool, list(range(12)), max_new_tokens=0).handle
    pool.release(source, retain=True)
    placement = pool.place([*range(8), 90, 91], 10)
    assert placement.source == source
    assert placement.reused_tokens == 8
    assert placement.evicted == (Eviction(source, 0, ()),)
    assert pool.probe(list(range(12))) == 8
    pool.check_integrity()


def test_a_sequence_that_others_hold_is_the_first_to_lose_its_handle():
    pool = KvPool(PoolLimits(capacity_tokens=100, max_live=3, max_retained=2, retained_tokens=100))
    pool.release(grown(pool, [7] * 5).handle, retain=True)
    covered = grown(pool, list(range(10))).handle
    pool.release(covered, retain=True)
    follow_up = grown(pool, [*range(10), 50, 51]).handle
    assert pool.release(follow_up, retain=True) == (Eviction(covered, 0, ()),)
    assert pool.probe([7] * 5) == 4


def test_retained_cells_are_bounded():
    pool = KvPool(LIMITS)
    for start in range(0, 60, 10):
        handle = grown(pool, list(range(start * 10, start * 10 + 10))).handle
        pool.release(handle, retain=True)
        assert pool.use().retained_tokens <= LIMITS.retained_tokens
        pool.check_integrity()


def test_the_bound_holds_when_the_last_live_holder_is_not_retained():
    pool = KvPool(PoolLimits(capacity_tokens=100, max_live=3, max_retained=4, retained_tokens=24))
    source = grown(pool, list(range(20))).handle
    pool.release(source, retain=True)
    holder = grown(pool, list(range(21))).handle
    other = grown(pool, list(range(50, 70))).handle
    assert pool.release(other, retain=True) == ()
    assert pool.release(holder, retain=False) == (Eviction(holder, 0, ()), Eviction(other, 0, ()))
    pool.check_integrity()


def test_nothing_computed_is_nothing_to_retain():
    pool = KvPool(LIMITS)
    handle = pool.place([1, 2], 1).handle
    assert pool.release(handle, retain=True) == (Eviction(handle, 0, ()),)


def test_models_that_cannot_be_cut_share_nothing():
    pool = KvPool(WITH_HOST, share=False)
    handle = grown(pool, list(range(100))).handle
    assert pool.probe(list(range(100))) == 0
    assert pool.release(handle, retain=True) == (Eviction(handle, 0, ()),)
    assert (pool.use().used_tokens, pool.use().host_capacity_tokens) == (0, 0)


def test_evicted_blocks_are_found_again_in_host_memory():
    pool = KvPool(WITH_HOST)
    tokens = list(range(150))
    evictions = pool.release(grown(pool, tokens).handle, retain=True)
    assert saved(evictions) == [(64, 128), (0, 64)]
    stash(pool, evictions, "copy")
    assert (pool.use().used_tokens, pool.use().host_tokens) == (0, 128)
    assert pool.probe([*tokens, 1]) == 128
    assert pool.probe(tokens[:128]) == 127
    placement = pool.place(tokens[:128], 4)
    assert placement.reused_tokens == 0
    assert [(stored.block, stored.payload) for stored in placement.restorable] == [
        (block, "copy") for block in blocks_of(tokens)
    ]
    pool.grow(placement.handle, tokens[:64])
    pool.grow(placement.handle, tokens[64:127])
    assert pool.release(placement.handle, retain=False) == (Eviction(placement.handle, 0, ()),)
    pool.clear()
    assert pool.probe(tokens) == 128
    pool.clear_host()
    assert (pool.probe(tokens), pool.use().host_tokens) == (0, 0)


def test_host_memory_continues_what_the_device_holds():
    pool = KvPool(WITH_HOST)
    tokens = list(range(200))
    stash(pool, pool.release(grown(pool, tokens).handle, retain=True))
    grown(pool, tokens[:100])
    assert pool.probe(tokens) == 192
    placement = pool.place(tokens, 4)
    assert placement.reused_tokens == 100
    assert [stored.block.start for stored in placement.restorable] == [64, 128]


def test_a_few_tokens_are_not_restored():
    pool = KvPool(WITH_HOST)
    tokens = list(range(128))
    stash(pool, pool.release(grown(pool, tokens).handle, retain=True))
    grown(pool, tokens[: 127 - MIN_RESTORE_TOKENS])
    assert pool.probe(tokens) == 127
    placement = pool.place(tokens, 4)
    assert len(placement.restorable) == 1
    pool.release(placement.handle, retain=False)
    grown(pool, [*tokens[: 128 - MIN_RESTORE_TOKENS], 999])
    assert pool.probe(tokens) == 128 - MIN_RESTORE_TOKENS
    assert pool.place(tokens, 4).restorable == ()


def served(pool, tokens, output=(), payload=None):
    """A request from its placement to its release; what it restored."""
    placement = pool.place(tokens, len(output))
    stash(pool, placement.evicted, payload)
    pool.grow(placement.handle, [*tokens[placement.reused_tokens :], *output])
    stash(pool, pool.release(placement.handle, retain=True), payload)
    return [stored.block.start for stored in placement.restorable]


def test_host_memory_keeps_what_was_used_last_and_the_beginnings_longest():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=4 * BLOCK_TOKENS))
    old, young, new = [0] * 129, [1] * 129, [2] * 65
    served(pool, old)
    served(pool, young)
    assert served(pool, old) == [0, 64]
    served(pool, new)
    assert [pool.probe([*tokens, 9]) for tokens in (old, young, new)] == [128, 64, 64]
    served(pool, [3] * 65)
    assert [pool.probe([*tokens, 9]) for tokens in (old, young, new)] == [128, 0, 64]
    served(pool, [4] * 129)
    assert [pool.probe([*tokens, 9]) for tokens in (old, young, new)] == [0, 0, 64]


def test_a_chain_that_was_partly_in_host_memory_keeps_its_beginning_longest():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=3 * BLOCK_TOKENS))
    served(pool, [0] * 65)
    served(pool, [0] * 129)
    served(pool, [0] * 193)
    served(pool, [1] * 65)
    served(pool, [2] * 65)
    assert pool.probe([0] * 200) == 64


def test_saving_the_rest_of_a_chain_keeps_its_beginning():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=3 * BLOCK_TOKENS))
    slow = pool.place([0] * 193, 0).handle
    for token in (0, 1, 2):
        served(pool, [token] * 65)
    pool.grow(slow, [0] * 193)
    evictions = pool.release(slow, retain=True)
    assert saved(evictions) == [(128, 192), (64, 128)]
    stash(pool, evictions)
    assert pool.probe([0] * 200) == 192


def test_host_memory_keeps_prompts_before_outputs_until_they_are_part_of_one():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=0, host_tokens=3 * BLOCK_TOKENS))
    prompt, answer = [0] * 64, [7] * 65
    served(pool, prompt, answer)
    served(pool, [1] * 65)
    served(pool, [2] * 65)
    assert pool.probe([*prompt, *answer]) == 64, "both blocks of the answer went before any prompt"
    served(pool, prompt, answer)
    assert pool.probe([*prompt, *answer]) == 64, "nor is there room for them beside prompts"
    pool.clear_host()
    served(pool, prompt, answer)
    assert served(pool, [*prompt, *answer, 8]) == [0, 64]
    served(pool, [1] * 65)
    assert pool.probe([*prompt, *answer]) == 128


def test_blocks_are_saved_when_the_last_holder_goes():
    pool = KvPool(PoolLimits(1000, max_live=3, max_retained=4, retained_tokens=300, host_tokens=1000))
    first = grown(pool, [*range(100), *range(200, 300)], 0).handle
    second = grown(pool, [*range(100), *range(300, 400)], 0).handle
    pool.release(first, retain=True)
    pool.release(second, retain=True)
    other = grown(pool, list(range(500, 700)), 0).handle
    evictions = pool.release(other, retain=True)
    assert evictions == (Eviction(first, 0, evictions[0].save), Eviction(second, 100, evictions[1].save))
    assert [saved([eviction]) for eviction in evictions] == [[(128, 192), (64, 128)], [(128, 192), (64, 128)]]
    stash(pool, evictions)
    assert saved(pool.release(grown(pool, [999] * 200, 0).handle, retain=True)) == [(128, 192), (64, 128), (0, 64)]


def test_what_is_in_host_memory_is_not_copied_again():
    pool = KvPool(WITH_HOST)
    tokens = list(range(150))
    stash(pool, pool.release(grown(pool, tokens).handle, retain=True))
    evictions = pool.release(generated(pool, tokens, [7] * 60), retain=True)
    assert saved(evictions) == [(128, 192)]


def test_stash_takes_what_was_asked_for_once():
    pool = KvPool(WITH_HOST)
    evictions = pool.release(grown(pool, list(range(150))).handle, retain=True)
    late, block = evictions[0].save
    pool.stash(block, None)
    with pytest.raises(ValueError, match=r"tokens 0\.\.64: not to be saved"):
        pool.stash(block, None)
    pool.place([1], 1)
    with pytest.raises(ValueError, match="not to be saved"):
        pool.stash(late, None)


def test_restorable_blocks_outlive_their_place_in_the_tier():
    pool = KvPool(PoolLimits(300, max_live=3, max_retained=4, retained_tokens=300, host_tokens=128))
    tokens = list(range(129))
    stash(pool, pool.release(grown(pool, tokens, 0).handle, retain=True))
    stash(pool, pool.place(list(range(500, 700)), 100).evicted, "copy")
    pool.clear()
    retained = grown(pool, list(range(800, 1000)), 0).handle
    pool.release(retained, retain=True)
    placement = pool.place(tokens, 100)
    assert [eviction.handle for eviction in placement.evicted] == [retained]
    stash(pool, placement.evicted)
    assert [stored.payload for stored in placement.restorable] == ["copy", "copy"]
    assert pool.probe(tokens) == 0


RUNS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([64, 40, 100, 70, 20, 1])), min_size=1, max_size=4)
"""Few different tokens in long runs, so that sequences meet, part, and end inside each other's blocks."""


MOSTLY = st.sampled_from([True, True, True, True, True, False])


def tokens_of(runs):
    return [token for token, count in runs for _ in range(count)]


def starts_with(tokens, prefix):
    return tokens[: len(prefix)] == prefix


@dataclass
class Held:
    """A sequence as the model sees it."""

    tokens: list[int]
    cells: list[int]
    prompt: int
    pending: list[int]
    max_new: int
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Placements from its first tokens: (tokens, number of the placement)."""
    released: int = 0
    """Order of release; 0 while it is live."""


class PoolMachine(RuleBasedStateMachine):
    """The pool against the obvious model: lists of tokens, ids of cells, and every use that ever was.

    The model is an engine too: it mirrors what the pool says, and a payload is what a block's copy would hold.
    """

    LIMITS = PoolLimits(capacity_tokens=700, max_live=3, max_retained=3, retained_tokens=400, host_tokens=10**6)
    SHARED_FOR = 5

    def __init__(self):
        super().__init__()
        self.patch = patch.object(retention, "SHARED_FOR_PLACEMENTS", self.SHARED_FOR)
        self.patch.start()
        self.pool = KvPool(self.LIMITS)
        self.held: dict[int, Held] = {}
        self.seen = [[]]
        self.new_cells = itertools.count()
        self.placements = self.releases = 0
        self.host: set[tuple[int, ...]] = set()
        """All that was stashed; the pool forgets none of it while the tier has room."""

    def teardown(self):
        self.patch.stop()

    @property
    def live(self):
        return {handle: held for handle, held in self.held.items() if not held.released}

    @property
    def retained(self):
        return {handle: held for handle, held in self.held.items() if held.released}

    def cells(self, sequences):
        return {cell for held in sequences for cell in held.cells}

    def others_hold(self, handle, tokens):
        return any(starts_with(held.tokens, tokens) for other, held in self.held.items() if other != handle)

    def in_host(self):
        return self.host

    # What the pool is to decide.

    def shared_on_device(self, tokens):
        return max(
            (length for length in range(len(tokens)) if length == 0 or self.others_hold(None, tokens[:length])),
            default=0,
        )

    def restorable(self, tokens, shared):
        run, limit = [], len(tokens) - 1
        for start in range(shared // BLOCK_TOKENS * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            if tuple(tokens[: start + BLOCK_TOKENS]) not in self.in_host():
                break
            run.append(start + BLOCK_TOKENS)
        return run if run and min(run[-1], limit) - shared >= MIN_RESTORE_TOKENS else []

    def shared_part(self, held):
        return max((tokens for tokens, at in held.starts if self.placements - at < self.SHARED_FOR), default=0)

    def prompt_part(self, held):
        return max([held.prompt, *(tokens for tokens, _ in held.starts)])

    def worth(self, held, position):
        """Of the token there: the kind, then what orders those of one kind."""
        if position == len(held.tokens):
            return (0, 0, held.released)
        if position < self.shared_part(held):
            return (3, max(at for _, at in held.starts), held.released)
        return (2 if position < self.prompt_part(held) else 1, 0, held.released)

    def evict_tail(self, gone):
        held = min(self.retained.values(), key=lambda held: self.worth(held, len(held.tokens) - 1))
        kind = self.worth(held, len(held.tokens) - 1)[0]
        self.cut(held, {1: self.prompt_part(held), 2: self.shared_part(held), 3: 0}[kind], gone)

    def evict_whole(self, gone):
        def first_sole(handle):
            held = self.held[handle]
            lengths = range(len(held.tokens) + 1)
            return max(length for length in lengths if length == 0 or self.others_hold(handle, held.tokens[:length]))

        handle = min(self.retained, key=lambda handle: self.worth(self.held[handle], first_sole(handle)))
        self.cut(self.held[handle], 0, gone)

    def cut(self, held, keep, gone):
        """Adds to `gone`: what the sequence was, how much of it stays, and the blocks that nobody holds any more."""
        handle = next(handle for handle, other in self.held.items() if other is held)
        before = held.tokens
        if self.others_hold(handle, before[:keep]):
            keep = 0
        held.tokens, held.cells = before[:keep], held.cells[:keep]
        ends = range(BLOCK_TOKENS, len(before) + 1, BLOCK_TOKENS)
        lost = [end for end in ends if end > keep and not self.others_hold(handle, before[:end])]
        lost = [end for end in lost if tuple(before[:end]) not in self.in_host()]
        was, _, earlier = gone.get(handle, (before, None, []))
        gone[handle] = (was, keep, [*earlier, *reversed(lost)])
        if not keep:
            del self.held[handle]

    # Mirroring.

    def mirror(self, evictions, gone, data):
        assert [(eviction.handle, eviction.keep_tokens) for eviction in evictions] == [
            (handle, keep) for handle, (_, keep, _) in gone.items()
        ]
        for eviction in evictions:
            tokens, _, lost = gone[eviction.handle]
            self.check_saved([block.end for block in eviction.save], lost)
            for block in eviction.save:
                assert block == blocks_of(tokens)[block.start // BLOCK_TOKENS]
                if data.draw(MOSTLY, label="copied"):
                    self.pool.stash(block, tuple(tokens[: block.end]))
                    self.host.add(tuple(tokens[: block.end]))

    def check_saved(self, ends, lost):
        assert ends == lost

    @rule(data=st.data(), runs=RUNS, max_new=st.integers(1, 80))
    def place(self, data, runs, max_new):
        self.start(data, runs, max_new)

    @rule(data=st.data(), runs=RUNS, output=RUNS)
    def serve(self, data, runs, output):
        """One request from its placement to its release."""
        output = tokens_of(output)[:100]
        if (handle := self.start(data, runs, len(output))) is not None:
            held = self.held[handle]
            self.compute(handle, held.pending)
            self.compute(handle, output)
            held.pending, held.max_new = [], 0
            self.seen.append(held.tokens)
            self.end(data, handle, retain=True)

    def start(self, data, runs, max_new):
        base = data.draw(st.sampled_from(self.seen))
        cut = data.draw(st.sampled_from([len(base), 0, len(base) // 2, *range(0, len(base), 16)]))
        tokens = (base[:cut] + tokens_of(runs))[:350]
        self.seen.append(tokens)
        shared = self.shared_on_device(tokens)
        restorable = self.restorable(tokens, shared)
        reach = min(restorable[-1], len(tokens) - 1) if restorable else shared
        assert self.pool.probe(tokens) == reach
        placement = self.pool.place(tokens, max_new)

        source = next((held for held in self.held.values() if starts_with(held.tokens, tokens[:shared])), None)
        if shared and placement is not None:
            source = self.held[placement.source]
            assert starts_with(source.tokens, tokens[:shared])
        new = Held(tokens[:shared], source.cells[:shared] if source else [], len(tokens), tokens[shared:], max_new)
        live = [*self.live.values(), new]
        promised = sum(len(held.pending) + held.max_new for held in live)
        if len(live) > self.LIMITS.max_live or len(self.cells(live)) + promised > self.LIMITS.capacity_tokens:
            assert placement is None
            return None
        assert placement is not None
        assert placement.handle not in self.held
        assert placement.reused_tokens == shared
        assert [stored.block.end for stored in placement.restorable] == restorable
        self.placements += 1
        self.held[placement.handle] = new
        if shared:
            for held in self.held.values():
                if starts_with(held.tokens, tokens[:shared]):
                    held.starts.append((shared, self.placements))
        gone: dict = {}
        while len(self.cells(self.held.values())) + promised > self.LIMITS.capacity_tokens:
            self.evict_tail(gone)
        self.mirror(placement.evicted, gone, data)
        for stored in placement.restorable:
            if not data.draw(MOSTLY, label="restored"):
                return placement.handle
            assert stored.payload == tuple(tokens[: stored.block.end])
            end = min(stored.block.end, len(tokens) - 1)
            self.compute(placement.handle, tokens[len(new.tokens) : end])
            new.pending = tokens[end:]
        assert len(new.tokens) == reach
        return placement.handle

    def compute(self, handle, tokens):
        self.pool.grow(handle, tokens)
        held = self.held[handle]
        held.tokens = held.tokens + tokens
        held.cells = held.cells + [next(self.new_cells) for _ in tokens]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 2), count=st.sampled_from([500, 100, 64, 1]))
    def step(self, data, token, count):
        handle = data.draw(st.sampled_from(sorted(self.live)))
        held = self.held[handle]
        if held.pending:
            self.compute(handle, held.pending[:count])
            held.pending = held.pending[count:]
        else:
            count = min(count, held.max_new)
            self.compute(handle, [token] * count)
            held.max_new -= count
        self.seen.append(held.tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), retain=MOSTLY)
    def release(self, data, retain):
        self.end(data, data.draw(st.sampled_from(sorted(self.live))), retain=retain)

    def end(self, data, handle, *, retain):
        evictions = self.pool.release(handle, retain=retain)
        gone: dict = {}
        self.releases += 1
        self.held[handle].released = self.releases
        if not retain or not self.held[handle].tokens:
            gone[handle] = (self.held.pop(handle).tokens, 0, [])
        while len(self.retained) > self.LIMITS.max_retained:
            self.evict_whole(gone)
        while len(self.cells(self.held.values())) - len(self.cells(self.live.values())) > self.LIMITS.retained_tokens:
            self.evict_tail(gone)
        self.mirror(evictions, gone, data)

    @precondition(lambda self: self.placements % 7 == 6)
    @rule()
    def clear(self):
        self.pool.clear()
        self.held.clear()

    @invariant()
    def books_agree(self):
        self.pool.check_integrity()
        assert self.pool.lengths() == {handle: len(held.tokens) for handle, held in self.held.items()}
        for handle, held in self.held.items():
            assert self.pool._index.tokens_of(handle) == held.tokens
        use = self.pool.use()
        assert use.used_tokens == len(self.cells(self.held.values()))
        assert use.retained_tokens == use.used_tokens - len(self.cells(self.live.values()))
        assert use.reserved_tokens == sum(len(held.pending) + held.max_new for held in self.live.values())
        assert use.host_tokens == len(self.in_host()) * BLOCK_TOKENS <= use.host_capacity_tokens


class TightHostMachine(PoolMachine):
    """With a tier that has to forget: what is in it is taken from the pool, as test_host_tier has the order."""

    LIMITS = PoolLimits(
        capacity_tokens=500, max_live=3, max_retained=4, retained_tokens=150, host_tokens=5 * BLOCK_TOKENS
    )

    def in_host(self):
        return {stored.payload for stored in self.pool._host._stored.values()}

    def check_saved(self, ends, lost):
        assert [end for end in lost if end in ends] == ends


class NoHostMachine(PoolMachine):
    """Without a second tier, and with little room."""

    LIMITS = PoolLimits(capacity_tokens=500, max_live=4, max_retained=2, retained_tokens=300)

    def check_saved(self, ends, lost):
        assert ends == []


for machine in (PoolMachine, TightHostMachine, NoHostMachine):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
TestTightHostMachine = TightHostMachine.TestCase
TestNoHostMachine = NoHostMachine.TestCase
