"""One prefill for a prefix that several requests need at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from backend_service.prefix_index import common_prefix
from backend_service.request import Phase, Request

MIN_GAIN_TOKENS = 32
"""A wait for fewer tokens than this is not begun: they cost less than the steps that would be waited for. A wait that
has begun goes on to the end of the prefix."""


class SingleFlight:
    """Holds a waiting request back while a running one is about to compute a prefix that both need.

    A held request loses nothing: the leader is ahead of it with the very tokens it would compute next, and gets the
    same share of each step that it would get itself. The bound on the wait is for a leader that makes no progress.
    """

    def __init__(self, probe: Callable[[Sequence[int], str], int], *, max_wait_s: float) -> None:
        """`probe`: leading tokens of a prompt that are reusable now under a cache salt. `max_wait_s` 0 holds nobody."""
        self._probe = probe
        self._max_wait_s = max_wait_s

    def holds(self, request: Request, active: Iterable[Request], now_s: float) -> bool:
        """Whether this waiting request should go on waiting; starts its wait and notes what it will find."""
        least = MIN_GAIN_TOKENS if request.held_s is None else 1
        coming = self._coming(request, active, least)
        if not coming or coming - self._probe(request.tokens, request.cache_salt) < least:
            request.held_s = None
            return False
        if request.held_s is None:
            request.held_s = now_s
        request.reusable_estimate = max(request.reusable_estimate, coming)
        return now_s - request.held_s < self._max_wait_s

    def _coming(self, request: Request, active: Iterable[Request], least: int) -> int:
        """The longest prefix of the request that a running one will have computed and that it has yet to compute at
        least so many tokens of."""
        coming = 0
        for leader in active:
            if leader.phase is Phase.PREFILL and leader.cache_salt == request.cache_salt:
                shared = min(common_prefix(request.packed, leader.packed), len(request.tokens) - 1)
                if shared - leader.computed_tokens >= least:
                    coming = max(coming, shared)
        return coming
