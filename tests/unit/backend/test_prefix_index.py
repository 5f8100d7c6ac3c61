from __future__ import annotations

from array import array
from threading import Thread
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend_service.prefix_index import Match, PrefixIndex, common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=12)
"""Few different tokens, so that paths meet, part and end inside each other's edges."""


def structure(index: PrefixIndex) -> Any:
    """Everything an operation could change, node identities included."""

    def of(node: Any) -> Any:
        children = {token: of(child) for token, child in node.children.items()}
        return id(node), node.edge.tolist(), set(node.owners), children

    return of(index._root), {owner: id(tail) for owner, tail in index._tails.items()}, index.total_tokens


def nodes(index: PrefixIndex) -> int:
    def below(node: Any) -> int:
        return 1 + sum(map(below, node.children.values()))

    return below(index._root) - 1


def index_of(**sequences: list[int]) -> PrefixIndex:
    index = PrefixIndex()
    for name, tokens in sequences.items():
        index.insert(int(name[1:]), tokens)
    return index


def shared_tokens(left: list[int], right: list[int]) -> int:
    """The obvious way."""
    return next((place for place in range(len(left)) if left[place : place + 1] != right[place : place + 1]), len(left))


class AgainstListsByOwner(RuleBasedStateMachine):
    """The index against the obvious model: a list of tokens for every owner."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[int, list[int]] = {}

    @rule(owner=st.integers(0, 6), tokens=TOKENS)
    def insert(self, owner: int, tokens: list[int]) -> None:
        if owner in self.model:
            with pytest.raises(ValueError, match="already"):
                self.index.insert(owner, tokens)
        else:
            self.index.insert(owner, tokens)
            self.model[owner] = list(tokens)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), owner=st.integers(7, 9), cut=st.integers(0, 12), tokens=TOKENS)
    def insert_a_branch(self, data: st.DataObject, owner: int, cut: int, tokens: list[int]) -> None:
        source = data.draw(st.sampled_from(sorted(self.model)))
        self.insert(owner, self.model[source][:cut] + tokens)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tokens=TOKENS)
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model)))
        self.index.extend(owner, tokens)
        self.model[owner] += tokens

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def follow_another_owner_token_by_token(self, data: st.DataObject) -> None:
        owner, leader = data.draw(st.sampled_from(sorted(self.model))), data.draw(st.sampled_from(sorted(self.model)))
        for token in self.model[leader][len(self.model[owner]) :]:
            self.index.extend(owner, [token])
            self.model[owner].append(token)
            self.index.check_integrity()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model)))
        self.index.remove(owner)
        del self.model[owner]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.integers(0, len(self.model[owner])))
        self.index.truncate(owner, length)
        del self.model[owner][length:]

    @rule(data=st.data(), tokens=TOKENS)
    def match(self, data: st.DataObject, tokens: list[int]) -> None:
        if self.model and data.draw(st.booleans()):
            source = self.model[data.draw(st.sampled_from(sorted(self.model)))]
            tokens = source[: data.draw(st.integers(0, len(source)))] + tokens
        common = {owner: shared_tokens(held, tokens) for owner, held in self.model.items()}
        length = max(common.values(), default=0)
        owners = frozenset(owner for owner, shared in common.items() if shared == length) if length else frozenset()
        before = structure(self.index)
        assert self.index.match(tokens) == Match(length, owners)
        assert structure(self.index) == before

    @invariant()
    def adds_up(self) -> None:
        self.index.check_integrity()
        assert self.index.owners == set(self.model)
        for owner, tokens in self.model.items():
            assert self.index.tokens_of(owner) == tokens
            others = [held for other, held in self.model.items() if other != owner]
            held = max((shared_tokens(other, tokens) for other in others), default=0)
            assert self.index.sole_tokens(owner) == len(tokens) - held
        distinct = {tuple(tokens[:end]) for tokens in self.model.values() for end in range(1, len(tokens) + 1)}
        assert self.index.total_tokens == len(distinct)


AgainstListsByOwner.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAgainstListsByOwner = AgainstListsByOwner.TestCase


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1000])
def testcommon_prefix_ends_at_the_first_difference_wherever_it_is(length: int) -> None:
    left = array("I", range(length))
    for place in {0, 1, length // 2, length - 2, length - 1} & set(range(length)):
        right = left[:]
        right[place] = 9999
        assert common_prefix(left, right) == place
    assert common_prefix(left, left[:]) == length
    assert common_prefix(left, left[: length // 2]) == length // 2


def test_a_match_may_end_inside_an_edge() -> None:
    index = index_of(_1=[5, 6, 7, 8], _2=[5, 6, 7, 9])
    assert index.match([5, 6, 0]) == Match(2, frozenset({1, 2}))
    assert index.match([5, 6, 7, 8, 8]) == Match(4, frozenset({1}))


def test_nothing_in_common_has_no_owners() -> None:
    assert index_of(_1=[5], _2=[]).match([6]) == Match(0, frozenset())


def test_tokens_appended_to_a_sole_owner_stay_in_one_node() -> None:
    index = index_of(_1=[1])
    for token in range(1000):
        index.extend(1, [token])
    assert nodes(index) == 1
    assert index.total_tokens == 1001


def test_owners_that_generate_the_same_tokens_share_them() -> None:
    index = index_of(_1=[1, 2], _2=[1, 2])
    for token in range(100):
        index.extend(1, [token])
        index.extend(2, [token])
    assert index.total_tokens == 102
    assert nodes(index) == 1
    index.check_integrity()


def test_the_tree_is_compact_again_once_a_branch_is_gone() -> None:
    index = index_of(_1=[1, 2, 3, 4], _2=[1, 2, 9], _3=[1, 2])
    assert nodes(index) == 3
    index.remove(2)
    assert nodes(index) == 2
    index.remove(3)
    assert nodes(index) == 1
    assert index.tokens_of(1) == [1, 2, 3, 4]
    index.remove(1)
    assert (nodes(index), index.total_tokens) == (0, 0)


def test_a_cut_takes_only_what_nobody_else_holds() -> None:
    index = index_of(_1=[1, 2, 3, 4, 5], _2=[1, 2, 3, 9])
    assert (index.sole_tokens(1), index.sole_tokens(2)) == (2, 1)
    index.truncate(1, 4)
    assert index.match([1, 2, 3, 4, 5]) == Match(4, frozenset({1}))
    index.truncate(1, 2)
    assert index.match([1, 2, 3, 4]) == Match(3, frozenset({2}))
    assert index.match([1, 2]) == Match(2, frozenset({1, 2}))
    assert (index.sole_tokens(1), index.sole_tokens(2)) == (0, 2)
    index.truncate(1, 0)
    assert (index.tokens_of(1), nodes(index)) == ([], 1)
    index.check_integrity()


def test_a_sequence_is_only_cut_to_what_it_has() -> None:
    index = index_of(_1=[1, 2, 3], _2=[1, 2])
    before = structure(index)
    for length in (-1, 4):
        with pytest.raises(ValueError, match=f"owner 1 cannot be cut to {length} tokens; it has 3"):
            index.truncate(1, length)
    index.truncate(1, 3)
    assert structure(index) == before


@pytest.mark.parametrize(
    "operation",
    [
        lambda i: i.extend(7, [1]),
        lambda i: i.remove(7),
        lambda i: i.truncate(7, 0),
        lambda i: i.tokens_of(7),
        lambda i: i.sole_tokens(7),
    ],
)
def test_an_unknown_owner_is_a_key_error(operation: Any) -> None:
    with pytest.raises(KeyError):
        operation(index_of(_1=[1, 2]))


def test_tokens_that_no_vocabulary_has_change_nothing() -> None:
    index = index_of(_1=[1, 2**32 - 1])
    before = structure(index)
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            index.extend(1, [3, bad])
        with pytest.raises(OverflowError):
            index.insert(2, [bad])
    assert structure(index) == before


def test_check_integrity_names_what_broke() -> None:
    index = index_of(_1=[1, 2, 3], _2=[1, 2, 4], _3=[1, 2])
    index._total_tokens += 1
    with pytest.raises(AssertionError, match="total_tokens is 5, the tree has 4"):
        index.check_integrity()
    index._total_tokens -= 1
    index._tails[2].owners.add(1)
    with pytest.raises(AssertionError, match="goes on in two children"):
        index.check_integrity()


def test_a_probe_beside_updates_sees_whole_states_only() -> None:
    index = index_of(_1=list(range(50)))
    seen: list[Match] = []

    def probe() -> None:
        for _ in range(400):
            seen.append(index.match(range(60)))

    thread = Thread(target=probe)
    thread.start()
    for _ in range(400):
        index.insert(2, [*range(50), 50])
        index.extend(2, range(51, 60))
        index.remove(2)
    thread.join()
    whole = {Match(50, frozenset({1})), Match(51, frozenset({2})), Match(60, frozenset({2}))}
    assert set(seen) <= whole
    index.check_integrity()


def test_a_probe_beside_a_cut_sees_the_sequence_before_or_after_it() -> None:
    index = index_of(_1=list(range(60)), _2=[*range(20), 99])
    seen: list[Match] = []

    def probe() -> None:
        for _ in range(400):
            seen.append(index.match(range(60)))

    thread = Thread(target=probe)
    thread.start()
    for _ in range(400):
        index.truncate(1, 40)
        index.extend(1, range(40, 60))
    thread.join()
    assert set(seen) <= {Match(40, frozenset({1})), Match(60, frozenset({1}))}
    index.check_integrity()
