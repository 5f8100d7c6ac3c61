"""Who is calling, and what that caller may do."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """What a caller may be allowed to do."""

    GENERATE = "generate"
    """Generate, CacheProbe, Route."""
    STATUS = "status"
    """Status, WatchStatus, ListBackends, WatchDecisions."""
    ADMIN = "admin"
    """DrainBackend."""
    ROUTE = "route"
    """To speak for other clients: `Attempt` is heeded. For routers."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One caller, as the token file has it."""

    name: str
    """Empty where callers are not told apart."""
    scopes: frozenset[Scope]
    cache_salt: str = ""
    """Prompts share a KV cache only where this is equal."""
    weight: float = 1.0
    """Of its share of a backend that is busy with several clients' requests; above 0."""
    max_in_flight: int | None = None
    """Requests at a time; None: no limit of its own."""
    tokens_per_minute: int | None = None
    """Prompt and new tokens; None: no limit."""

    def client(self, claimed: str) -> str:
        """Whose request it is, of which a router may have claimed that it is somebody's."""
        return claimed if claimed and Scope.ROUTE in self.scopes else self.name

    def share(self, claimed: float | None) -> float:
        """The weight of a client's share, of which a router may have claimed another one."""
        return claimed if claimed is not None and Scope.ROUTE in self.scopes else self.weight

    def salt(self, claimed: str) -> str:
        """The cache salt of a request, of which a router may have claimed another one."""
        return claimed if claimed and Scope.ROUTE in self.scopes else self.cache_salt


ANYONE = Caller("", frozenset(Scope))
"""Whoever calls where no token is asked for: may do everything."""

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYONE)


def current_caller() -> Caller:
    """Who made the gRPC call that this code runs for."""
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """For the rest of this call's task; the interceptor does it."""
    _caller.set(caller)
