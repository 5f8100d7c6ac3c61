"""The tier of evicted blocks: names, what goes first, what a prefix finds."""

from __future__ import annotations

import itertools
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backend_service.host_tier import BLOCK_TOKENS, MIN_RESTORE_TOKENS, HostTier, blocks_of, keys_of

FOREVER = 10**6


def tokens_of(symbols):
    """One whole block a symbol."""
    return [ord(symbol) for symbol in symbols for _ in range(BLOCK_TOKENS)]


def chain_of(symbols):
    return blocks_of(tokens_of(symbols))


def put_chain(tier, symbols, prompt_blocks=FOREVER):
    """As a pool does it; the payload of a block is its chain."""
    chain = chain_of(symbols)
    tier.touch(chain, prompt_tokens=prompt_blocks * BLOCK_TOKENS)
    for block in tier.missing(chain, 0, prompt_tokens=prompt_blocks * BLOCK_TOKENS):
        index = block.start // BLOCK_TOKENS
        tier.put(block, symbols[: index + 1], is_output=index >= prompt_blocks)
        tier.touch(chain[:index], prompt_tokens=prompt_blocks * BLOCK_TOKENS)


def found(tier, symbols, from_tokens=0, to_tokens=FOREVER):
    return [stored.payload for stored in tier.match(keys_of(tokens_of(symbols)), from_tokens, to_tokens)]


def tier_of(blocks):
    return HostTier(blocks * BLOCK_TOKENS)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=4 * BLOCK_TOKENS))
def test_blocks_are_whole_and_in_order(tokens):
    blocks = blocks_of(tokens)
    assert [(block.start, block.end) for block in blocks] == [
        (start, start + BLOCK_TOKENS) for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
    ]
    assert [block.key for block in blocks] == list(keys_of(tokens))
    assert {len(block.key) for block in blocks} <= {16}


@given(changed=st.integers(0, 3 * BLOCK_TOKENS - 1), bit=st.integers(0, 31))
def test_a_key_names_the_block_and_everything_before_it(changed, bit):
    tokens = list(range(3 * BLOCK_TOKENS))
    other = [*tokens]
    other[changed] ^= 1 << bit
    same = [block == twin for block, twin in zip(blocks_of(tokens), blocks_of(other), strict=True)]
    assert same == [block.end <= changed for block in blocks_of(tokens)]
    assert blocks_of((*tokens, 7)) == blocks_of(tokens)


def test_a_run_may_start_without_what_the_device_holds():
    tier = tier_of(8)
    for block in chain_of("abcd")[1:]:
        tier.put(block, block.start, is_output=False)
    assert found(tier, "abcd") == []
    assert found(tier, "abcd", from_tokens=64) == [64, 128, 192]
    assert found(tier, "abcd", from_tokens=100) == [64, 128, 192]
    assert found(tier, "abcd", from_tokens=128) == [128, 192]
    assert found(tier, "abxd", from_tokens=64) == [64]
    assert found(tier, "abcd", from_tokens=256) == []


def test_a_few_tokens_are_not_worth_restoring():
    tier = tier_of(8)
    put_chain(tier, "ab")
    least = MIN_RESTORE_TOKENS
    assert found(tier, "ab", from_tokens=128 - least) == ["ab"]
    assert found(tier, "ab", from_tokens=128 - least + 1) == []
    assert found(tier, "ab", from_tokens=100, to_tokens=100 + least) == ["ab"]
    assert found(tier, "ab", from_tokens=100, to_tokens=100 + least - 1) == []
    assert found(tier, "ab", from_tokens=63) == ["a", "ab"]


def test_only_as_much_is_hashed_as_is_needed():
    tier = tier_of(8)
    keys = keys_of(tokens_of("abcd"))
    tier.match(keys, 0, 256)
    assert len(list(keys)) == 4, "an empty tier has nothing to find"
    put_chain(tier, "a")
    keys = keys_of(tokens_of("abcd"))
    assert len(tier.match(keys, 0, 256)) == 1
    assert len(list(keys)) == 2
    keys = keys_of(tokens_of("abcd"))
    tier.match(keys, 245, 256)
    assert len(list(keys)) == 4


def test_outputs_go_before_prompts_and_a_chain_from_its_end():
    tier = tier_of(4)
    put_chain(tier, "abc", prompt_blocks=2)
    put_chain(tier, "xyz", prompt_blocks=1)
    assert (found(tier, "abc"), found(tier, "xyz")) == (["a", "ab"], ["x", "xy"])
    put_chain(tier, "u")
    assert (found(tier, "abc"), found(tier, "xyz")) == (["a", "ab"], ["x"])
    put_chain(tier, "v")
    assert (found(tier, "abc"), found(tier, "xyz")) == (["a"], ["x"])
    tier.touch(chain_of("a"), prompt_tokens=FOREVER)
    put_chain(tier, "wr")
    assert [found(tier, symbols) for symbols in ("abc", "xyz", "u", "v", "wr")] == [["a"], [], [], ["v"], ["w", "wr"]]


def test_an_output_that_became_part_of_a_prompt_is_kept_like_one():
    tier = tier_of(3)
    put_chain(tier, "ab", prompt_blocks=1)
    tier.touch(chain_of("ab"), prompt_tokens=2 * BLOCK_TOKENS)
    put_chain(tier, "cd", prompt_blocks=1)
    assert (found(tier, "ab"), found(tier, "cd")) == (["a", "ab"], ["c"])
    tier.put(chain_of("ab")[1], None, is_output=True)
    tier.touch(chain_of("ab"), prompt_tokens=0)
    put_chain(tier, "e")
    assert (found(tier, "ab"), found(tier, "cd")) == (["a", "ab"], []), "once in a prompt, always prompt"


def test_nothing_is_copied_that_would_not_stay():
    tier = tier_of(3)
    put_chain(tier, "ab")
    missing = tier.missing(chain_of("xyzuv"), 0, prompt_tokens=BLOCK_TOKENS)
    assert missing == (chain_of("x")[0],), "with x there is no room for outputs beside prompts"
    assert tier.missing(chain_of("abcd"), 0, prompt_tokens=0) == (chain_of("abc")[2],)
    assert tier.missing(chain_of("abcd"), 192, prompt_tokens=0) == (chain_of("abcd")[3],)
    assert tier.missing(chain_of("abcd"), 193, prompt_tokens=0) == (chain_of("abcd")[3],)
    assert tier.missing(chain_of("stuvw"), 0, prompt_tokens=FOREVER) == tuple(reversed(chain_of("stu")))
    assert tier.missing(chain_of("stuvw"), 64, prompt_tokens=FOREVER) == tuple(reversed(chain_of("stuv")[1:]))
    assert HostTier(BLOCK_TOKENS - 1).missing(chain_of("ab"), 0, prompt_tokens=FOREVER) == ()


def test_a_tier_of_nothing_holds_nothing():
    tier = HostTier(0)
    tier.put(chain_of("a")[0], None, is_output=False)
    assert (tier.used_tokens, found(tier, "a")) == (0, [])
    with pytest.raises(ValueError, match="cannot be"):
        HostTier(-1)


def test_clear_forgets_everything():
    tier = tier_of(4)
    put_chain(tier, "abc", prompt_blocks=2)
    tier.clear()
    assert (tier.used_tokens, found(tier, "abc")) == (0, [])
    tier.check_integrity()


def test_check_integrity_names_what_broke():
    tier = tier_of(4)
    put_chain(tier, "ab", prompt_blocks=1)
    first, second = chain_of("ab")
    tier._prompts[second.key] = None
    with pytest.raises(AssertionError, match="prompt and output"):
        tier.check_integrity()
    del tier._prompts[first.key], tier._prompts[second.key]
    with pytest.raises(AssertionError, match="no order of use"):
        tier.check_integrity()


def test_a_probe_beside_uses_finds_what_stays():
    tier = tier_of(6)
    put_chain(tier, "abc", prompt_blocks=1)
    seen = set()

    def probe():
        for _ in range(1000):
            seen.add(tuple(found(tier, "abc")))

    thread = Thread(target=probe)
    thread.start()
    for round_ in itertools.count():
        tier.touch(chain_of("abc"), prompt_tokens=(round_ % 4) * BLOCK_TOKENS)
        put_chain(tier, "xyz"[round_ % 3])
        if not thread.is_alive():
            break
    assert seen == {("a", "ab", "abc")}


class AgainstAListInOrderOfUse(RuleBasedStateMachine):
    """The tier against the obvious model: a list of chains, the longest unused first, each for its last block."""

    CAPACITY = 5

    def __init__(self):
        super().__init__()
        self.tier = tier_of(self.CAPACITY)
        self.order: list[str] = []
        self.prompts: set[str] = set()

    def use(self, symbols, prompt_blocks):
        """Of what is stored, from the end to the beginning."""
        for end in range(len(symbols), 0, -1):
            if (name := symbols[:end]) in self.order:
                self.order.remove(name)
                self.order.append(name)
                if end <= prompt_blocks:
                    self.prompts.add(name)

    @rule(symbols=st.text("ab", min_size=1, max_size=6), prompt_blocks=st.integers(0, 6))
    def touch(self, symbols, prompt_blocks):
        self.tier.touch(chain_of(symbols), prompt_tokens=prompt_blocks * BLOCK_TOKENS)
        self.use(symbols, prompt_blocks)

    @rule(data=st.data(), symbols=st.text("ab", min_size=1, max_size=6), prompt_blocks=st.integers(0, 6))
    def put(self, data, symbols, prompt_blocks):
        end = data.draw(st.integers(1, len(symbols)))
        name = symbols[:end]
        self.tier.put(chain_of(name)[-1], name, is_output=end > prompt_blocks)
        if name in self.order:
            self.order.remove(name)
        self.order.append(name)
        if end <= prompt_blocks:
            self.prompts.add(name)
        if len(self.order) > self.CAPACITY:
            gone = min(self.order, key=lambda name: name in self.prompts)
            self.order.remove(gone)
            self.prompts.discard(gone)

    @rule(symbols=st.text("ab", min_size=1, max_size=6), held=st.integers(0, 5))
    def match(self, symbols, held):
        names = itertools.takewhile(
            lambda name: name in self.order, [symbols[: end + 1] for end in range(held, len(symbols))]
        )
        assert found(self.tier, symbols, held * BLOCK_TOKENS) == list(names)

    @rule()
    def clear(self):
        self.tier.clear()
        self.order.clear()
        self.prompts.clear()

    @invariant()
    def agrees(self):
        self.tier.check_integrity()
        assert self.tier.used_tokens == len(self.order) * BLOCK_TOKENS
        for stored in self.tier._stored.values():
            assert stored.payload in self.order


AgainstAListInOrderOfUse.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestAgainstAListInOrderOfUse = AgainstAListInOrderOfUse.TestCase


@given(
    capacity=st.integers(1, 6),
    chains=st.lists(st.tuples(st.text("ab", min_size=1, max_size=6), st.integers(0, 6)), max_size=12),
)
def test_no_block_goes_before_the_one_that_follows_it(capacity, chains):
    tier = tier_of(capacity)
    for symbols, prompt_blocks in chains:
        put_chain(tier, symbols, prompt_blocks)
        names = {stored.payload for stored in tier._stored.values()}
        assert all(len(name) == 1 or name[:-1] in names for name in names)
        tier.check_integrity()
