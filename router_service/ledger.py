"""Work booked here that a Status does not show yet.

A decision books a lease. Once a Status names the lease's attempt, the Status counts that work and the ledger no longer
does, neither then nor later: an attempt that disappears from Status again has ended. So nothing is counted twice and
two requests in the same instant see each other.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from service_kit.requests import Priority


@dataclass(frozen=True, slots=True)
class Lease:
    """One attempt's claim on a backend, from the decision until its stream is over."""

    attempt_id: str
    """Unique over all attempts of all requests."""
    backend: str
    incarnation: str
    """Of the backend's process, when booked."""
    prompt_tokens: int
    """All that has to be in the KV cache before the next token: the prompt, and `generated_tokens`."""
    reusable_tokens: int
    """The prefix found reusable when it was booked; at most prompt_tokens."""
    max_new_tokens: int
    """What may still come."""
    priority: Priority
    origin: str
    """The attempt id under which another router sent the request here; empty without one."""
    booked_s: float
    """On the router's clock."""
    workload: str
    ignore_eos: bool
    client: str = ""
    """Whose request it is; empty where clients are not told apart."""
    generated_tokens: int = 0
    """Of the answer, which backends that were lost since have generated."""
    finish_s: float | None = None
    """When it is predicted to be done, on the router's clock; None where nothing is predicted."""

    @property
    def prefill_tokens(self) -> int:
        """What the prompt adds to the backend's work."""
        return self.prompt_tokens - self.reusable_tokens


@dataclass(frozen=True, slots=True)
class Pending:
    """Sums over one backend's leases that no Status has shown."""

    requests: int
    prefill_tokens: int
    decode_tokens: int


class Ledger:
    """Leases by attempt and by backend."""

    def __init__(self) -> None:
        self._open: dict[str, Lease] = {}
        self._unseen: dict[str, dict[str, Lease]] = {}
        self._turns: dict[str, int] = {}
        self._turn = 0

    def book(
        self,
        backend: str,
        incarnation: str,
        *,
        prompt_tokens: int,
        reusable_tokens: int,
        max_new_tokens: int,
        priority: Priority = Priority.INTERACTIVE,
        origin: str = "",
        now_s: float = 0.0,
        workload: str = "",
        ignore_eos: bool = False,
        client: str = "",
        generated_tokens: int = 0,
        finish_s: float | None = None,
    ) -> Lease:
        """Count a request's work on a backend until a Status shows it or the lease is released. See `Lease`."""
        reusable_tokens = min(reusable_tokens, prompt_tokens)
        attempt_id = str(uuid.uuid4())
        lease = Lease(
            attempt_id,
            backend,
            incarnation,
            prompt_tokens,
            reusable_tokens,
            max_new_tokens,
            priority,
            origin,
            now_s,
            workload,
            ignore_eos,
            client,
            generated_tokens,
            finish_s,
        )
        self._open[lease.attempt_id] = lease
        self._unseen.setdefault(backend, {})[lease.attempt_id] = lease
        self._turn += 1
        self._turns[backend] = self._turn
        return lease

    def release(self, lease: Lease) -> None:
        """The attempt is over. Calling it again does nothing."""
        self._open.pop(lease.attempt_id, None)
        self._unseen.get(lease.backend, {}).pop(lease.attempt_id, None)

    def on_status(self, backend: str, incarnation: str, attempt_ids: Collection[str]) -> None:
        """Hand over what a Status shows, and give up what was booked on an earlier process of this backend: that work
        died with it, and should a request have reached the new process after all, its Status will show it."""
        unseen = self._unseen.get(backend, {})
        for lease in list(unseen.values()):
            if lease.attempt_id in attempt_ids or lease.incarnation != incarnation:
                del unseen[lease.attempt_id]

    def pending(self, backend: str) -> Pending:
        """What a backend's Status leaves out."""
        unseen = self._unseen.get(backend, {}).values()
        return Pending(
            len(unseen),
            sum(lease.prefill_tokens for lease in unseen),
            sum(lease.max_new_tokens for lease in unseen),
        )

    def last_turn(self, backend: str) -> int:
        """Number of the backend's latest booking among all bookings; 0 before its first."""
        return self._turns.get(backend, 0)

    def unseen(self, backend: str) -> Iterator[Lease]:
        """The leases behind `pending`, oldest first."""
        return iter(self._unseen.get(backend, {}).values())

    def origin(self, attempt_id: str) -> str | None:
        """Who sent the attempt here, None when it is not one of ours."""
        lease = self._open.get(attempt_id)
        return None if lease is None else lease.origin

    def finish_s(self, client: str | None, now_s: float) -> float | None:
        """The first of the predicted finishes that are still ahead, of one client's leases or (None) of all; None where
        none is. O(leases)."""
        finishes_s = (
            lease.finish_s
            for lease in self._open.values()
            if lease.finish_s is not None and lease.finish_s > now_s and client in (None, lease.client)
        )
        return min(finishes_s, default=None)

    def __len__(self) -> int:
        """Leases not released, seen in a Status or not."""
        return len(self._open)
