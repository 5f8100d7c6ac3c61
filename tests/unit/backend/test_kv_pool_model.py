"""The pool's books and decisions under random use, with and without a second tier, for two cache salts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend_service import retention
from backend_service.host_tier import BLOCK_TOKENS, MIN_RESTORE_TOKENS, blocks_of
from backend_service.kv_pool import KvPool, PoolLimits

LENGTHS = [BLOCK_TOKENS, *(BLOCK_TOKENS * sixteenths // 16 for sixteenths in (10, 25, 17, 5)), 1]
RUNS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(LENGTHS)), min_size=1, max_size=4)
"""Few different tokens in long runs, so that sequences meet, part, and end inside each other's blocks."""


SALTS = st.sampled_from(["", "", "s"])
MOSTLY = st.sampled_from([True, True, True, True, True, False])


def tokens_of(runs):
    return [token for token, count in runs for _ in range(count)]


def starts_with(tokens, prefix):
    return tokens[: len(prefix)] == prefix


def common(left, right):
    """Leading tokens in common."""
    differs = (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differs, min(len(left), len(right)))


@dataclass
class Held:
    """A sequence as the model sees it."""

    tokens: list[int]
    cells: list[int]
    prompt: int
    pending: list[int]
    max_new: int
    salt: str
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Placements from its first tokens: (tokens, number of the placement)."""
    released: int = 0
    """Order of release; 0 while it is live."""


class PoolMachine(RuleBasedStateMachine):
    """The pool against the obvious model: lists of tokens, ids of cells, and every use that ever was.

    The model is an engine too: it mirrors what the pool says, and a payload is what a block's copy would hold.
    """

    LIMITS = PoolLimits(
        capacity_tokens=11 * BLOCK_TOKENS,
        max_live=3,
        max_retained=3,
        retained_tokens=6 * BLOCK_TOKENS,
        host_tokens=10**6,
    )
    SHARED_FOR = 5
    COPIED = RESTORED = RETAINED = MOSTLY

    def __init__(self):
        super().__init__()
        self.patch = patch.object(retention, "SHARED_FOR_PLACEMENTS", self.SHARED_FOR)
        self.patch.start()
        self.pool = KvPool(self.LIMITS)
        self.held: dict[int, Held] = {}
        self.seen = [[]]
        self.new_cells = itertools.count()
        self.placements = self.releases = 0
        self.host: set[tuple[str, tuple[int, ...]]] = set()
        """All that was stashed, by salt; the pool forgets none of it while the tier has room."""

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

    def of_salt(self, salt):
        return {handle: held for handle, held in self.held.items() if held.salt == salt}

    def held_by_others(self, handle, tokens, salt):
        """The longest prefix that another sequence of the same salt holds."""
        others = (held for other, held in self.of_salt(salt).items() if other != handle)
        return max((common(held.tokens, tokens) for held in others), default=0)

    def in_host(self):
        return self.host

    # What the pool is to decide.

    def restorable(self, tokens, shared, salt):
        run, limit = [], len(tokens) - 1
        for start in range(shared // BLOCK_TOKENS * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            if (salt, tuple(tokens[: start + BLOCK_TOKENS])) not in self.in_host():
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
        worth = {handle: self.worth(held, len(held.tokens) - 1) for handle, held in self.retained.items()}
        handle = min(worth, key=worth.__getitem__)
        held = self.held[handle]
        self.cut(handle, {1: self.prompt_part(held), 2: self.shared_part(held), 3: 0}[worth[handle][0]], gone)

    def evict_whole(self, gone):
        handle = min(
            self.retained,
            key=lambda handle: self.worth(self.held[handle], self.held_elsewhere(handle)),
        )
        self.cut(handle, 0, gone)

    def held_elsewhere(self, handle):
        held = self.held[handle]
        return self.held_by_others(handle, held.tokens, held.salt)

    def cut(self, handle, keep, gone):
        """Adds to `gone`: what the sequence was, how much of it stays, and the blocks that nobody holds any more."""
        held = self.held[handle]
        before, by_others = held.tokens, self.held_elsewhere(handle)
        if keep <= by_others:
            keep = 0
        held.tokens, held.cells = before[:keep], held.cells[:keep]
        ends = [end for end in range(BLOCK_TOKENS, len(before) + 1, BLOCK_TOKENS) if end > max(keep, by_others)]
        lost = [end for end in ends if (held.salt, tuple(before[:end])) not in self.in_host()]
        was, _, _, earlier = gone.get(handle, (before, None, None, []))
        gone[handle] = (was, held.salt, keep, [*earlier, *reversed(lost)])
        if not keep:
            del self.held[handle]

    # Mirroring.

    def mirror(self, evictions, gone, data):
        assert [(eviction.handle, eviction.keep_tokens) for eviction in evictions] == [
            (handle, keep) for handle, (_, _, keep, _) in gone.items()
        ]
        for eviction in evictions:
            tokens, salt, _, lost = gone[eviction.handle]
            self.check_saved([block.end for block in eviction.save], lost)
            for block in eviction.save:
                assert block == blocks_of(tokens, salt)[block.start // BLOCK_TOKENS]
                if data.draw(self.COPIED, label="copied"):
                    name = (salt, tuple(tokens[: block.end]))
                    self.pool.stash(block, name)
                    self.host.add(name)

    def check_saved(self, ends, lost):
        assert ends == lost

    @rule(data=st.data(), runs=RUNS, max_new=st.integers(1, 5 * BLOCK_TOKENS // 4))
    def place(self, data, runs, max_new):
        self.start(data, runs, max_new)

    @rule(data=st.data(), runs=RUNS, output=RUNS)
    def serve(self, data, runs, output):
        """One request from its placement to its release."""
        output = self.output(tokens_of(output)[: 3 * BLOCK_TOKENS // 2])
        if (handle := self.start(data, runs, len(output))) is not None:
            held = self.held[handle]
            self.compute(handle, held.pending)
            self.compute(handle, output)
            held.pending, held.max_new = [], 0
            self.seen.append(held.tokens)
            self.end(data, handle, retain=True)

    def start(self, data, runs, max_new):
        base = data.draw(st.sampled_from(self.seen))
        cut = data.draw(st.sampled_from([len(base), 0, len(base) // 2, *range(0, len(base), BLOCK_TOKENS // 4)]))
        tokens = (base[:cut] + tokens_of(runs))[: 11 * BLOCK_TOKENS // 2]
        salt = data.draw(SALTS, label="salt")
        self.seen.append(tokens)
        shared = self.held_by_others(None, tokens[:-1], salt)
        restorable = self.restorable(tokens, shared, salt)
        reach = min(restorable[-1], len(tokens) - 1) if restorable else shared
        assert self.pool.probe(tokens, salt) == reach
        placement = self.pool.place(tokens, max_new, salt)

        kin = self.of_salt(salt)
        source = next((held for held in kin.values() if starts_with(held.tokens, tokens[:shared])), None)
        if shared and placement is not None:
            source = kin[placement.source]
            assert starts_with(source.tokens, tokens[:shared])
        cells = source.cells[:shared] if source else []
        new = Held(tokens[:shared], cells, len(tokens), tokens[shared:], max_new, salt)
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
            for held in self.of_salt(salt).values():
                if starts_with(held.tokens, tokens[:shared]):
                    held.starts.append((shared, self.placements))
        gone: dict = {}
        while len(self.cells(self.held.values())) + promised > self.LIMITS.capacity_tokens:
            self.evict_tail(gone)
        self.mirror(placement.evicted, gone, data)
        for stored in placement.restorable:
            if not data.draw(self.RESTORED, label="restored"):
                return placement.handle
            assert stored.payload == (salt, tuple(tokens[: stored.block.end]))
            end = min(stored.block.end, len(tokens) - 1)
            self.compute(placement.handle, tokens[len(new.tokens) : end])
            new.pending = tokens[end:]
        assert len(new.tokens) == reach
        return placement.handle

    def output(self, tokens):
        """What a request generates."""
        return tokens

    def compute(self, handle, tokens):
        self.pool.grow(handle, tokens)
        held = self.held[handle]
        held.tokens = held.tokens + tokens
        held.cells = held.cells + [next(self.new_cells) for _ in tokens]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 2), count=st.sampled_from([8 * BLOCK_TOKENS, *LENGTHS]))
    def step(self, data, token, count):
        handle = data.draw(st.sampled_from(sorted(self.live)))
        held = self.held[handle]
        if held.pending:
            self.compute(handle, held.pending[:count])
            held.pending = held.pending[count:]
        else:
            count = min(count, held.max_new)
            self.compute(handle, self.output([token] * count))
            held.max_new -= count
        self.seen.append(held.tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        handle = data.draw(st.sampled_from(sorted(self.live)))
        self.end(data, handle, retain=data.draw(self.RETAINED, label="retain"))

    def end(self, data, handle, *, retain):
        evictions = self.pool.release(handle, retain=retain)
        gone: dict = {}
        self.releases += 1
        self.held[handle].released = self.releases
        if not retain or not self.held[handle].tokens:
            held = self.held.pop(handle)
            gone[handle] = (held.tokens, held.salt, 0, [])
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
        capacity_tokens=8 * BLOCK_TOKENS,
        max_live=3,
        max_retained=4,
        retained_tokens=5 * BLOCK_TOKENS // 2,
        host_tokens=5 * BLOCK_TOKENS,
    )

    def in_host(self):
        return {stored.payload for stored in self.pool._host._stored.values()}

    def check_saved(self, ends, lost):
        assert [end for end in lost if end in ends] == ends


class OrderMachine(TightHostMachine):
    """With nothing that fails, answers that are in nobody else's prompt, and evictions of several sequences, whole."""

    LIMITS = replace(TightHostMachine.LIMITS, max_retained=2, retained_tokens=6 * BLOCK_TOKENS)
    SHARED_FOR = 1
    COPIED = RESTORED = RETAINED = st.just(True)

    def __init__(self):
        super().__init__()
        self.new_tokens = itertools.count(3)

    def output(self, tokens):
        return [next(self.new_tokens) for _ in tokens]

    @precondition(lambda self: self.placements % 7 == 6)
    @rule()
    def clear(self):
        self.pool.clear()
        self.pool.clear_host()
        self.held.clear()

    @invariant()
    def no_block_goes_before_the_one_that_follows_it(self):
        host = self.in_host()
        for salt, tokens in host:
            before = list(tokens[:-BLOCK_TOKENS])
            on_device = any(starts_with(held.tokens, before) for held in self.of_salt(salt).values())
            assert not before or (salt, tuple(before)) in host or on_device


class NoHostMachine(PoolMachine):
    """Without a second tier, and with little room."""

    LIMITS = PoolLimits(capacity_tokens=8 * BLOCK_TOKENS, max_live=4, max_retained=2, retained_tokens=5 * BLOCK_TOKENS)

    def check_saved(self, ends, lost):
        assert ends == []


for machine in (PoolMachine, TightHostMachine, OrderMachine, NoHostMachine):
    steps = 60 if machine is OrderMachine else 30
    machine.TestCase.settings = settings(max_examples=50, stateful_step_count=steps, deadline=None)
TestPoolMachine = PoolMachine.TestCase
TestTightHostMachine = TightHostMachine.TestCase
TestOrderMachine = OrderMachine.TestCase
TestNoHostMachine = NoHostMachine.TestCase
