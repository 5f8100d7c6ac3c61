"""The router's own Status: its whole fleet as if it were one backend, for clients and for a router before this one."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Sequence

from phaseroute.v1 import inference_pb2 as pb
from router_service.backend import Backend
from router_service.decision import Rates
from router_service.fleet import Fleet
from router_service.ledger import Ledger
from router_service.snapshot import Snapshot

REFERENCE_PREFILL_TOKENS = 512
REFERENCE_DECODE_TOKENS = 128
"""The request by which backends are compared for speed."""


class FleetView:
    """Makes Status messages; each has a higher sequence than the one before."""

    def __init__(self, fleet: Fleet, ledger: Ledger) -> None:
        self.draining = False
        """The router itself is about to stop."""
        self._fleet = fleet
        self._ledger = ledger
        self._incarnation = str(uuid.uuid4())
        self._sequences = itertools.count(1)

    def status(self) -> pb.BackendStatus:
        """Sums over the backends in use, and every request on them or on the way to them.

        The rates are the fastest backend's: exact for a fleet that is idle, too low for one under load, where the
        others share the work; a router before this one errs on the side of caution. Draining while no backend takes
        work. Several models are named together. Fingerprints, precision and scheduling policy are empty where backends
        differ in them. Whether backends make progress is judged here: one that makes none is not in use, and a router
        before this one, which does not see their speeds apart, has nothing to judge by.
        """
        backends = self._fleet.in_use
        snapshots = [backend.snapshot for backend in backends if backend.snapshot is not None]
        models = sorted({snapshot.model for snapshot in snapshots})
        names = ", ".join(backend.name for backend in backends) or "none"
        status = pb.BackendStatus(
            incarnation=self._incarnation,
            sequence=next(self._sequences),
            model=pb.ModelInfo(
                name=", ".join(models),
                fingerprint=_common(snapshot.fingerprint for snapshot in snapshots),
                context_tokens=max((snapshot.context_tokens for snapshot in snapshots), default=0),
                tokenizer_fingerprint=_common(snapshot.tokenizer_fingerprint for snapshot in snapshots),
                precision=_common(snapshot.precision for snapshot in snapshots),
            ),
            engine=pb.EngineInfo(
                name="router",
                device=f"{len(backends)} of {len(self._fleet.backends)} backends serve: {names}",
                simulated=any(snapshot.wire.engine.simulated for snapshot in snapshots),
            ),
            max_active=sum(snapshot.max_active for snapshot in snapshots),
            max_queued=sum(snapshot.wire.max_queued for snapshot in snapshots),
            max_queued_tokens=_bound(snapshot.wire.max_queued_tokens for snapshot in snapshots),
            requests=itertools.chain.from_iterable(self._requests(backend) for backend in backends),
            kv_cache=_kv_cache(snapshots),
            draining=self.draining or not backends,
            scheduling_policy=_common(snapshot.wire.scheduling_policy for snapshot in snapshots),
        )
        rates = [snapshot.rates for snapshot in snapshots if snapshot.rates is not None]
        if rates:
            fastest = min(rates, key=_reference_s)
            status.isolated_rates.prefill_tokens_per_s = fastest.prefill_tokens_per_s
            status.isolated_rates.decode_tokens_per_s = fastest.decode_tokens_per_s
        return status

    def _requests(self, backend: Backend) -> Iterator[pb.RequestStatus]:
        """Under the attempt ids that our own caller knows: a router before this one waits for its own to show up."""
        if backend.snapshot is not None:
            for request in backend.snapshot.wire.requests:
                origin = self._ledger.origin(request.attempt_id)
                if origin is None:
                    yield request
                else:
                    renamed = pb.RequestStatus()
                    renamed.CopyFrom(request)
                    renamed.attempt_id = origin
                    yield renamed
        for lease in self._ledger.unseen(backend.name):
            yield pb.RequestStatus(
                attempt_id=lease.origin,
                phase=pb.REQUEST_PHASE_QUEUED,
                remaining_prefill_tokens=lease.prefill_tokens,
                remaining_decode_tokens=lease.max_new_tokens,
                client=lease.client,
                priority=lease.priority.value,
                workload=lease.workload,
                ignore_eos=lease.ignore_eos,
                prompt_tokens=lease.prompt_tokens,
            )


def _kv_cache(snapshots: Sequence[Snapshot]) -> pb.KvCacheStatus:
    caches = [snapshot.wire.kv_cache for snapshot in snapshots]
    return pb.KvCacheStatus(
        capacity_tokens=sum(cache.capacity_tokens for cache in caches),
        used_tokens=sum(cache.used_tokens for cache in caches),
        retained_tokens=sum(cache.retained_tokens for cache in caches),
        reserved_tokens=sum(cache.reserved_tokens for cache in caches),
        host_tokens=sum(cache.host_tokens for cache in caches),
        host_capacity_tokens=sum(cache.host_capacity_tokens for cache in caches),
    )


def _bound(bounds: Iterable[int]) -> int:
    """The sum of bounds, of which 0 is none."""
    known = list(bounds)
    return sum(known) if all(known) else 0


def _common(values: Iterable[str]) -> str:
    different = set(values)
    return different.pop() if len(different) == 1 else ""


def _reference_s(rates: Rates) -> float:
    return REFERENCE_PREFILL_TOKENS / rates.prefill_tokens_per_s + REFERENCE_DECODE_TOKENS / rates.decode_tokens_per_s
