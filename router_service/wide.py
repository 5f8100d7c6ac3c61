"""Shortlists for wide fleets: a request cannot ask a thousand backends for their prefix, nor play them all forward."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from router_service.ledger import Lease, Ledger
from router_service.recent_prefixes import RecentPrefixes
from router_service.shortlist import Shortlist
from router_service.snapshot import Snapshot
from service_kit.step_time import StepShape

PrefixKeys = tuple[bytes, ...]
"""Of the beginnings of a prompt; see `recent_prefixes.key_of`."""
WIDE = 32
"""Fleets up to this size are looked at in full."""
SHORTLISTED = 5
"""Of a wider one: so many that look best by a rough estimate,"""
LIKELY = 3
"""and at most so many that lately had prompts which begin like this one."""


@dataclass(frozen=True, slots=True)
class Rough:
    """What one backend takes for work, roughly: as if its whole batch were always decoding."""

    prefill_token_s: float
    decode_token_s: float
    """Of one request; a step of the batch that it would join."""
    shared_decode_token_s: float
    """Of the batch; a step over its rows."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> Rough | None:
        """None without a speed."""
        if snapshot.pace is not None:
            model = snapshot.pace.model
            rows = min(snapshot.max_active, snapshot.active + snapshot.queued + 1)
            context = 256 * rows
            step_s = model.seconds(StepShape(rows, rows, context))
            return cls(max(model.per_token_s, 1e-9), step_s, step_s / rows)
        if snapshot.rates is not None:
            token_s = 1 / snapshot.rates.decode_tokens_per_s
            return cls(1 / snapshot.rates.prefill_tokens_per_s, token_s, token_s)
        return None

    def work_s(self, prefill_tokens: int, decode_tokens: int) -> float:
        """Of the backend's time."""
        return prefill_tokens * self.prefill_token_s + decode_tokens * self.shared_decode_token_s


class Wide:
    """Keeps one rough figure a backend up to date."""

    def __init__(self, names: Collection[str], ledger: Ledger, rng: random.Random) -> None:
        self.prefixes = RecentPrefixes()
        self._shortlist = Shortlist(tuple(names))
        self._ledger = ledger
        self._rng = rng
        self._seen: dict[str, tuple[Snapshot, Rough | None]] = {}

    def hear(self, name: str, snapshot: Snapshot, received_at_s: float) -> None:
        """The newest Status of a backend that takes work; costs nothing where it is the one of last time. One without a
        speed is never on the list, so in a wide fleet it is not explored either."""
        seen = self._seen.get(name)
        if seen is None or seen[0] is not snapshot:
            if seen is not None and seen[0].incarnation != snapshot.incarnation:
                self.prefixes.forget(name)  # its cache died with the process
            self._update(name, snapshot, received_at_s)

    def narrow(
        self,
        eligible: Collection[str],
        *,
        keys: PrefixKeys,
        prompt_tokens: int,
        new_tokens: float,
        now_s: float,
    ) -> Sequence[str]:
        """The names worth a closer look, of those that may take the request; each was heard of before."""
        count = SHORTLISTED
        while True:
            picked = self._shortlist.pick(
                count,
                prefill_tokens=prompt_tokens,
                new_tokens=new_tokens,
                now_s=now_s,
                always=self.prefixes.likely(keys, LIKELY),
                rng=self._rng,
            )
            # Most of a fleet is eligible most of the time.
            left = [name for name in picked if name in eligible]
            if len(left) >= SHORTLISTED or count >= len(self._seen):
                return left or list(eligible)[:SHORTLISTED]
            count *= 4

    def booked(self, lease: Lease, keys: PrefixKeys) -> None:
        """A request was sent there."""
        self.prefixes.note(keys, lease.backend)
        seen = self._seen.get(lease.backend)
        if seen is not None and seen[1] is not None:
            self._shortlist.book(lease.backend, seen[1].work_s(lease.prefill_tokens, lease.max_new_tokens))

    def _update(self, name: str, snapshot: Snapshot, received_at_s: float) -> None:
        rough = Rough.of(snapshot)
        self._seen[name] = (snapshot, rough)
        if rough is None:
            self._shortlist.remove(name)
            return
        pending = self._ledger.pending(name)
        self._shortlist.set(
            name,
            backlog_s=rough.work_s(
                snapshot.waiting_prefill_tokens + pending.prefill_tokens,
                snapshot.waiting_decode_tokens + pending.decode_tokens,
            ),
            at_s=received_at_s,
            prefill_token_s=rough.prefill_token_s,
            decode_token_s=rough.decode_token_s,
        )
