"""Whose request it is: a router's word counts, nobody else's does."""

from __future__ import annotations

from service_kit.identity import ANYONE, Caller, Scope

ALICE = Caller("alice", frozenset({Scope.GENERATE}), cache_salt="of alice", weight=2.0)
ROUTER = Caller("router", frozenset({Scope.GENERATE, Scope.ROUTE}), cache_salt="of router", weight=5.0)


def test_a_client_speaks_for_itself():
    assert (ALICE.client("bob"), ALICE.salt("of bob"), ALICE.share(9.0)) == ("alice", "of alice", 2.0)


def test_a_router_speaks_for_its_clients():
    assert (ROUTER.client("bob"), ROUTER.salt("of bob"), ROUTER.share(9.0)) == ("bob", "of bob", 9.0)
    assert (ROUTER.client(""), ROUTER.salt(""), ROUTER.share(None)) == ("router", "of router", 5.0)


def test_where_nobody_is_asked_everybody_may():
    assert ANYONE.scopes == frozenset(Scope)
    assert (ANYONE.client(""), ANYONE.salt(""), ANYONE.share(None)) == ("", "", 1.0)
