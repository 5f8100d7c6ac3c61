"""The tier of evicted blocks: names, what goes first, what a prefix finds."""

from __future__ import annotations

import itertools
from array import array
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend_service.host_tier import BLOCK_TOKENS, MIN_RESTORE_TOKENS, HostTier, blocks_of, keys_of
from backend_service.prefix_index import PACKED

FOREVER = 10**6


def tokens_of(symbols):
    """One whole block a symbol."""
    return [ord(symbol) for symbol in symbols for _ in range(BLOCK_TOKENS)]


def chain_of(symbols):
    return blocks_of(tokens_of(symbols))


def put(tier, names):
    """The copies of reserved blocks; the payload of a block is its chain."""
    for name in names:
        tier.put(chain_of(name)[-1], name)


def reserve(tier, symbols, from_tokens=0, prompt_blocks=FOREVER):
    """What of a chain is to be copied, the last first."""
    chain = chain_of(symbols)
    save = tier.reserve(chain, from_tokens, prompt_tokens=prompt_blocks * BLOCK_TOKENS)
    assert set(save) <= set(chain)
    return [symbols[: block.end // BLOCK_TOKENS] for block in save]


def put_chain(tier, symbols, prompt_blocks=FOREVER):
    """One decision and its copies, as a pool does it."""
    tier.cancel_reserved()
    put(tier, reserve(tier, symbols, prompt_blocks=prompt_blocks))


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


@given(left=st.text(max_size=40), right=st.text(max_size=40))
def test_chains_of_two_salts_have_no_key_in_common(left, right):
    tokens = list(range(3 * BLOCK_TOKENS))
    same = {*keys_of(tokens, left)} & {*keys_of(tokens, right)}
    assert len(same) == (3 if left == right else 0)


def test_a_salt_that_looks_like_a_block_names_no_chain_behind_it():
    first, second = tokens_of("a"), tokens_of("b")
    like_a_block = array(PACKED, first).tobytes().decode()
    assert not {*keys_of(second, like_a_block)} & {*keys_of([*first, *second])}


def test_a_run_may_start_without_what_the_device_holds():
    tier = tier_of(8)
    put(tier, reserve(tier, "abcd", from_tokens=BLOCK_TOKENS))
    names = ["ab", "abc", "abcd"]
    assert found(tier, "abcd") == []
    assert found(tier, "abcd", from_tokens=BLOCK_TOKENS) == names
    assert found(tier, "abcd", from_tokens=BLOCK_TOKENS + 1) == names
    assert found(tier, "abcd", from_tokens=2 * BLOCK_TOKENS - 1) == names
    assert found(tier, "abcd", from_tokens=2 * BLOCK_TOKENS) == names[1:]
    assert found(tier, "abxd", from_tokens=BLOCK_TOKENS) == names[:1]
    assert found(tier, "abcd", from_tokens=4 * BLOCK_TOKENS) == []


def test_a_few_tokens_are_not_worth_restoring():
    tier = tier_of(8)
    put_chain(tier, "abc")
    least, end, begin = MIN_RESTORE_TOKENS, 3 * BLOCK_TOKENS, BLOCK_TOKENS + 5
    assert found(tier, "abc", from_tokens=end - least)[-1] == "abc"
    assert found(tier, "abc", from_tokens=end - least + 1) == []
    assert found(tier, "abcd", from_tokens=end - least + 1) == [], "though more is wanted"
    assert found(tier, "abc", from_tokens=begin, to_tokens=begin + least)[0] == "ab"
    assert found(tier, "abc", from_tokens=begin, to_tokens=begin + least - 1) == []
    assert found(tier, "abc", from_tokens=BLOCK_TOKENS - 1) == ["a", "ab", "abc"], "one token of the first counts"


def test_only_as_much_is_hashed_as_is_needed():
    tier, end = tier_of(8), 4 * BLOCK_TOKENS
    keys = keys_of(tokens_of("abcd"))
    tier.match(keys, 0, end)
    assert len(list(keys)) == 4, "an empty tier has nothing to find"
    put_chain(tier, "a")
    keys = keys_of(tokens_of("abcd"))
    assert len(tier.match(keys, 0, end)) == 1
    assert len(list(keys)) == 2
    keys = keys_of(tokens_of("abcd"))
    tier.match(keys, end - MIN_RESTORE_TOKENS + 1, end)
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
    assert reserve(tier, "ab", prompt_blocks=0) == []
    tier.touch(chain_of("ab"), prompt_tokens=0)
    put_chain(tier, "e")
    assert (found(tier, "ab"), found(tier, "cd")) == (["a", "ab"], []), "once in a prompt, always prompt"


def test_nothing_is_copied_that_would_not_stay():
    def save(symbols, from_tokens=0, prompt_blocks=FOREVER):
        tier = tier_of(3)
        put_chain(tier, "ab")
        return reserve(tier, symbols, from_tokens, prompt_blocks)

    assert save("xyzuv", prompt_blocks=1) == ["x"], "with x there is no room for outputs beside prompts"
    assert save("abcd", prompt_blocks=0) == ["abc"]
    assert save("abcd", from_tokens=3 * BLOCK_TOKENS, prompt_blocks=0) == ["abcd"]
    assert save("abcd", from_tokens=3 * BLOCK_TOKENS + 1, prompt_blocks=0) == ["abcd"]
    assert save("abcd", from_tokens=4 * BLOCK_TOKENS, prompt_blocks=0) == []
    assert save("stuvw") == ["stu", "st", "s"]
    assert save("stuvw", from_tokens=BLOCK_TOKENS) == ["stuv", "stu", "st"]
    assert reserve(HostTier(BLOCK_TOKENS - 1), "ab") == []


def test_a_chain_with_a_gap_goes_from_its_end():
    tier = tier_of(4)
    put(tier, reserve(tier, "ab", from_tokens=BLOCK_TOKENS))
    names = reserve(tier, "abc")
    assert names == ["abc", "a"], "b is here"
    put(tier, names)
    put_chain(tier, "xy")
    assert found(tier, "abc") == ["a", "ab"]


def test_of_several_decisions_each_counts_on_what_the_earlier_ones_left():
    tier = tier_of(3)
    put_chain(tier, "x")
    put_chain(tier, "ab")
    earlier, later = reserve(tier, "abc"), reserve(tier, "xyz")
    assert (earlier, later) == (["abc"], ["xyz", "xy", "x"]), "for c, x had to go"
    put(tier, [*earlier, *later])
    assert (found(tier, "abc"), found(tier, "xyz")) == ([], ["x", "xy", "xyz"])
    tier.check_integrity()


def test_a_copy_is_taken_once_and_only_if_it_was_asked_for():
    tier = tier_of(3)
    first, second = chain_of("ab")
    with pytest.raises(ValueError, match=rf"tokens 0\.\.{BLOCK_TOKENS}: not to be saved"):
        tier.put(first, "early")
    put(tier, reserve(tier, "a"))
    with pytest.raises(ValueError, match="not to be saved"):
        tier.put(first, "again")
    assert reserve(tier, "ab") == ["ab"]
    tier.cancel_reserved()
    tier.check_integrity()
    with pytest.raises(ValueError, match="not to be saved"):
        tier.put(second, "late")
    assert found(tier, "ab") == ["a"]


def test_what_was_not_copied_takes_no_room():
    tier = tier_of(3)
    reserve(tier, "abc")
    assert (tier.used_tokens, found(tier, "abc")) == (0, [])
    put_chain(tier, "x")
    put_chain(tier, "yz")
    assert (found(tier, "x"), found(tier, "yz")) == (["x"], ["y", "yz"])


def test_a_tier_of_nothing_holds_nothing():
    tier = HostTier(0)
    assert reserve(tier, "a") == []
    assert (tier.used_tokens, found(tier, "a")) == (0, [])
    with pytest.raises(ValueError, match="cannot be"):
        HostTier(-1)


def test_clear_forgets_everything():
    tier = tier_of(4)
    put_chain(tier, "abc", prompt_blocks=2)
    reserve(tier, "x")
    tier.clear()
    assert (tier.used_tokens, found(tier, "abc")) == (0, [])
    with pytest.raises(ValueError, match="not to be saved"):
        put(tier, "x")
    tier.check_integrity()


def test_check_integrity_names_what_broke():
    tier = tier_of(4)
    put_chain(tier, "ab", prompt_blocks=1)
    first, second = chain_of("ab")
    tier._prompts[second.key] = None
    with pytest.raises(AssertionError, match="prompt and output"):
        tier.check_integrity()
    del tier._prompts[first.key], tier._prompts[second.key]
    with pytest.raises(AssertionError, match="in no order of use"):
        tier.check_integrity()
    tier._prompts[first.key] = tier._prompts[b"?"] = None
    with pytest.raises(AssertionError, match="not here"):
        tier.check_integrity()
    del tier._prompts[b"?"]
    tier._reserved.add(second)
    with pytest.raises(AssertionError, match="still to come"):
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


def test_an_output_does_not_ask_for_the_room_of_prompts_behind_it():
    """Another request had the next block as a prompt. The output would be copied, and its place given away at once."""
    tier = tier_of(5)
    put(tier, reserve(tier, "aaaa", 0, 4))
    put(tier, reserve(tier, "ba", BLOCK_TOKENS, 2))
    assert tier.used_tokens == 5 * BLOCK_TOKENS
    assert reserve(tier, "ba", 0, 0) == []
    tier.check_integrity()


class AgainstAListInOrderOfUse(RuleBasedStateMachine):
    """The tier against the obvious model: a list of chains, the longest unused first, each for its last block."""

    CAPACITY = 5

    def __init__(self):
        super().__init__()
        self.tier = tier_of(self.CAPACITY)
        self.order: list[str] = []
        self.prompts: set[str] = set()
        self.asked: list[str] = []
        """Copies that have not come."""

    @property
    def stored(self):
        return [name for name in self.order if name not in self.asked]

    def use(self, symbols, prompt_blocks):
        """Of what is here, from the end to the beginning."""
        for end in range(len(symbols), 0, -1):
            if (name := symbols[:end]) in self.order:
                self.order.remove(name)
                self.order.append(name)
                if end <= prompt_blocks:
                    self.prompts.add(name)

    def forget(self, name):
        self.order.remove(name)
        self.prompts.discard(name)

    @rule(symbols=st.text("ab", min_size=1, max_size=6), prompt_blocks=st.integers(0, 6))
    def touch(self, symbols, prompt_blocks):
        self.tier.touch(chain_of(symbols), prompt_tokens=prompt_blocks * BLOCK_TOKENS)
        self.use(symbols, prompt_blocks)

    @rule(
        symbols=st.text("ab", min_size=1, max_size=6),
        held=st.integers(0, 6 * BLOCK_TOKENS),
        prompt_blocks=st.integers(0, 6),
    )
    def reserve(self, symbols, held, prompt_blocks):
        save, here = [], set(self.order)
        for end in range(1, len(symbols) + 1):
            other_prompts = self.prompts - {symbols[:earlier] for earlier in range(1, end + 1)}
            beside = len(here & {symbols[:earlier] for earlier in range(1, end)})
            beside += len(other_prompts) if end > prompt_blocks else 0
            if end * BLOCK_TOKENS > held and symbols[:end] not in here and beside < self.CAPACITY:
                save.append(symbols[:end])
                here.add(symbols[:end])
        assert reserve(self.tier, symbols, held, prompt_blocks) == save[::-1]
        self.order += save
        self.asked += save
        self.use(symbols, prompt_blocks)
        while len(self.order) > self.CAPACITY:
            gone = min(self.order, key=lambda name: name in self.prompts)
            assert gone not in save
            self.forget(gone)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def put(self, data):
        name = data.draw(st.sampled_from(self.asked))
        put(self.tier, [name])
        self.asked = [other for other in self.asked if other != name]

    @rule()
    def cancel_reserved(self):
        self.tier.cancel_reserved()
        for name in set(self.asked) & set(self.order):
            self.forget(name)
        self.asked.clear()

    @rule(symbols=st.text("ab", min_size=1, max_size=6), held=st.integers(0, 5))
    def match(self, symbols, held):
        names = itertools.takewhile(
            lambda name: name in self.stored, [symbols[: end + 1] for end in range(held, len(symbols))]
        )
        assert found(self.tier, symbols, held * BLOCK_TOKENS) == list(names)

    @rule()
    def clear(self):
        self.tier.clear()
        self.order.clear()
        self.prompts.clear()
        self.asked.clear()

    @invariant()
    def agrees(self):
        self.tier.check_integrity()
        assert self.tier.used_tokens == len(self.stored) * BLOCK_TOKENS
        for stored in self.tier._stored.values():
            assert stored.payload in self.stored


AgainstAListInOrderOfUse.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestAgainstAListInOrderOfUse = AgainstAListInOrderOfUse.TestCase


@given(
    capacity=st.integers(1, 6),
    decisions=st.lists(
        st.lists(st.tuples(st.text("ab", min_size=1, max_size=6), st.integers(0, 6)), max_size=3), max_size=8
    ),
)
def test_no_block_goes_before_the_one_that_follows_it(capacity, decisions):
    tier = tier_of(capacity)
    for chains in decisions:
        tier.cancel_reserved()
        copies = [reserve(tier, symbols, 0, prompt_blocks) for symbols, prompt_blocks in chains]
        put(tier, dict.fromkeys(itertools.chain(*copies)))
        names = {stored.payload for stored in tier._stored.values()}
        assert all(len(name) == 1 or name[:-1] in names for name in names)
        tier.check_integrity()
