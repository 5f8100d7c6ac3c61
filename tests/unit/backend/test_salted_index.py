"""Prefixes by cache salt."""

from __future__ import annotations

from threading import Thread

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend_service.prefix_index import Match
from backend_service.salted_index import SaltedIndex

TOKENS = st.lists(st.integers(0, 2), max_size=10)
SALTS = st.sampled_from(["", "a", "b"])


def common(left: list[int], right: list[int]) -> int:
    """Leading tokens in common."""
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


class AgainstListsByOwner(RuleBasedStateMachine):
    """The index against the obvious model: a salt and a list of tokens for every owner."""

    def __init__(self) -> None:
        super().__init__()
        self.index = SaltedIndex()
        self.model: dict[int, tuple[str, list[int]]] = {}

    @rule(owner=st.integers(0, 6), tokens=TOKENS, salt=SALTS)
    def insert(self, owner: int, tokens: list[int], salt: str) -> None:
        if owner in self.model:
            with pytest.raises(ValueError, match="already"):
                self.index.insert(owner, tokens, salt)
        else:
            self.index.insert(owner, tokens, salt)
            self.model[owner] = (salt, list(tokens))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tokens=TOKENS)
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model)))
        self.index.extend(owner, tokens)
        self.model[owner][1].extend(tokens)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.integers(0, len(self.model[owner][1])))
        self.index.truncate(owner, length)
        del self.model[owner][1][length:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model)))
        self.index.remove(owner)
        del self.model[owner]

    @rule(data=st.data(), tokens=TOKENS, salt=SALTS)
    def match(self, data: st.DataObject, tokens: list[int], salt: str) -> None:
        """Often with what another salt has."""
        if self.model and data.draw(st.booleans()):
            _, source = self.model[data.draw(st.sampled_from(sorted(self.model)))]
            tokens = source[: data.draw(st.integers(0, len(source)))] + tokens
        shared = {owner: common(held, tokens) for owner, (held_by, held) in self.model.items() if held_by == salt}
        length = max(shared.values(), default=0)
        owners = frozenset(owner for owner, own in shared.items() if own == length) if length else frozenset()
        assert self.index.match(tokens, salt) == Match(length, owners)

    @invariant()
    def adds_up(self) -> None:
        self.index.check_integrity()
        assert self.index.owners == set(self.model)
        for owner, (salt, tokens) in self.model.items():
            assert self.index.tokens_of(owner) == tokens
            assert self.index.salt_of(owner) == salt
            others = [held for other, (of, held) in self.model.items() if other != owner and of == salt]
            elsewhere = max((common(held, tokens) for held in others), default=0)
            assert self.index.sole_tokens(owner) == len(tokens) - elsewhere
        prefixes = {(salt, *tokens[:end]) for salt, tokens in self.model.values() for end in range(1, len(tokens) + 1)}
        assert self.index.total_tokens == len(prefixes)


AgainstListsByOwner.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAgainstListsByOwner = AgainstListsByOwner.TestCase


def test_a_salt_is_forgotten_with_its_last_owner() -> None:
    index = SaltedIndex()
    for number in range(1000):
        index.insert(7, [1, 2], f"salt {number}")
        index.remove(7)
    assert not index._indices
    assert index.match([1, 2], "salt 3") == Match(0, frozenset())


def test_what_is_refused_leaves_no_salt_behind() -> None:
    index = SaltedIndex()
    with pytest.raises(OverflowError):
        index.insert(1, [-1], "a")
    index.insert(1, [5], "a")
    with pytest.raises(ValueError, match="owner 1 is in the index already"):
        index.insert(1, [5], "b")
    index.check_integrity()
    assert (index.salt_of(1), index.match([5], "b").length) == ("a", 0)


@pytest.mark.parametrize("operation", ["remove", "sole_tokens", "tokens_of", "salt_of"])
def test_an_unknown_owner_is_a_key_error(operation: str) -> None:
    with pytest.raises(KeyError):
        getattr(SaltedIndex(), operation)(7)


def test_check_integrity_notices_a_sequence_in_another_salt() -> None:
    index = SaltedIndex()
    index.insert(1, [5], "a")
    index.insert(2, [5], "b")
    index._salts[2] = "a"
    with pytest.raises(AssertionError, match="salt"):
        index.check_integrity()


def test_a_probe_beside_salts_that_come_and_go_sees_its_own_only() -> None:
    index = SaltedIndex()
    tokens = list(range(50))
    index.insert(1, tokens[:20], "mine")
    seen: list[Match] = []

    def probe() -> None:
        for _ in range(400):
            seen.append(index.match(tokens, "mine"))
            seen.append(index.match(tokens, "theirs"))

    thread = Thread(target=probe)
    thread.start()
    for _ in range(400):
        index.insert(2, tokens, "theirs")
        index.remove(2)
    thread.join()
    assert set(seen[::2]) == {Match(20, frozenset({1}))}
    assert set(seen[1::2]) <= {Match(0, frozenset()), Match(50, frozenset({2}))}
