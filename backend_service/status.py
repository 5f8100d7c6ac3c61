"""A scheduler snapshot as the wire shows it."""

from __future__ import annotations

from backend_service.engines.base import EngineInfo
from backend_service.request import Phase, RequestView
from backend_service.scheduler import Snapshot
from backend_service.step_model import IsolatedRates
from phaseroute.v1 import inference_pb2 as pb

_PHASES = {
    Phase.QUEUED: pb.REQUEST_PHASE_QUEUED,
    Phase.PREFILL: pb.REQUEST_PHASE_PREFILL,
    Phase.DECODE: pb.REQUEST_PHASE_DECODE,
}


def to_proto(
    snapshot: Snapshot,
    *,
    incarnation: str,
    sequence: int,
    info: EngineInfo,
    rates: IsolatedRates,
    max_active: int,
    max_queued: int,
    draining: bool,
    now_s: float,
) -> pb.BackendStatus:
    """`now_s` on the scheduler's clock."""
    model = snapshot.step_model
    return pb.BackendStatus(
        incarnation=incarnation,
        sequence=sequence,
        model=pb.ModelInfo(
            name=info.model_name,
            fingerprint=info.model_fingerprint,
            context_tokens=info.context_tokens,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            precision=info.precision,
        ),
        engine=pb.EngineInfo(name=info.name, device=info.device, simulated=info.simulated),
        max_active=max_active,
        max_queued=max_queued,
        requests=[_request(view) for view in snapshot.requests],
        kv_cache=pb.KvCacheStatus(
            capacity_tokens=snapshot.kv.capacity_tokens,
            used_tokens=snapshot.kv.used_tokens,
            retained_tokens=snapshot.kv.retained_tokens,
            reserved_tokens=snapshot.kv.reserved_tokens,
            host_tokens=snapshot.kv.host_tokens,
            host_capacity_tokens=snapshot.kv.host_capacity_tokens,
        ),
        isolated_rates=pb.IsolatedRates(
            prefill_tokens_per_s=rates.prefill_tokens_per_s, decode_tokens_per_s=rates.decode_tokens_per_s
        ),
        step_model=pb.StepModel(
            base_s=model.base_s,
            per_token_s=model.per_token_s,
            per_row_s=model.per_row_s,
            per_attended_s=model.per_attended_s,
            samples=model.samples,
            residual_p90_s=model.residual_p90_s,
        )
        if model
        else None,
        draining=draining,
        seconds_since_progress=max(0.0, now_s - snapshot.progress_s) if snapshot.requests else 0.0,
        scheduling_policy=snapshot.policy_name,
    )


def _request(view: RequestView) -> pb.RequestStatus:
    return pb.RequestStatus(
        attempt_id=view.id,
        phase=_PHASES[view.phase],
        remaining_prefill_tokens=view.remaining_prefill_tokens,
        remaining_decode_tokens=view.remaining_decode_tokens,
        generated_tokens=view.generated_tokens,
        context_tokens=view.context_tokens,
        priority=view.priority.value,
    )
