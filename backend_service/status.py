"""A scheduler snapshot as the wire shows it."""

from __future__ import annotations

from backend_service.engines.base import EngineInfo
from backend_service.request import Phase, RequestView
from backend_service.scheduler import Snapshot
from backend_service.step_model import IsolatedRates
from phaseroute.v1 import inference_pb2 as pb
from service_kit.step_time import StepModel

_PHASES = {
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
    max_active: int | None = None,
    max_queued: int,
    max_queued_tokens: int = 0,
    draining: bool,
    now_s: float,
    viewer: str | None = None,
) -> pb.BackendStatus:
    """`max_active` None: the scheduler's. `now_s` on its clock.

    `viewer`: the client that this is for; None: one that may see everything. Of the requests of others a client sees
    what it needs to know how busy the backend is, and not whose they are, what they are named, or what for.
    """
    due_now_s = now_s if snapshot.virtual_s is None else snapshot.virtual_s
    requests = [
        *(_active(view) for view in snapshot.active),
        *(_waiting(view, view.due_s - due_now_s) for view in snapshot.waiting),
    ]
    if viewer is not None:
        for request in requests:
            if request.client != viewer:
                for field in ("attempt_id", "workload", "client"):
                    request.ClearField(field)
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
        max_active=snapshot.max_active if max_active is None else max_active,
        max_active_reason=snapshot.max_active_reason,
        max_queued=max_queued,
        max_queued_tokens=max_queued_tokens,
        requests=requests,
        kv_cache=pb.KvCacheStatus(
            capacity_tokens=snapshot.kv.capacity_tokens,
            used_tokens=snapshot.kv.used_tokens,
            retained_tokens=snapshot.kv.retained_tokens,
            reserved_tokens=snapshot.kv.reserved_tokens,
            host_tokens=snapshot.kv.host_tokens,
            host_capacity_tokens=snapshot.kv.host_capacity_tokens,
            padded=snapshot.kv.padded,
        ),
        isolated_rates=pb.IsolatedRates(
            prefill_tokens_per_s=rates.prefill_tokens_per_s, decode_tokens_per_s=rates.decode_tokens_per_s
        ),
        step_model=_step_model(snapshot.step_model, snapshot.measured_s, now_s) if snapshot.step_model else None,
        draining=draining,
        seconds_since_progress=max(0.0, now_s - snapshot.progress_s) if snapshot.requests else 0.0,
        scheduling_policy=snapshot.policy_name,
        step_rules=pb.StepRules(
            step_tokens=snapshot.step_limits.step_tokens,
            step_target_s=snapshot.step_limits.step_target_s,
            promote_batch_after_s=snapshot.promote_batch_after_s,
        ),
    )


def _step_model(model: StepModel, measured_s: float | None, now_s: float) -> pb.StepModel:
    return pb.StepModel(
        base_s=model.base_s,
        per_token_s=model.per_token_s,
        per_row_s=model.per_row_s,
        per_attended_s=model.per_attended_s,
        samples=model.samples,
        residual_p90_s=model.residual_p90_s,
        row_corrections=[pb.RowCorrection(rows=rows, seconds=seconds) for rows, seconds in model.row_corrections_s],
        age_s=0.0 if measured_s is None else max(0.0, now_s - measured_s),
    )


def _active(view: RequestView) -> pb.RequestStatus:
    return pb.RequestStatus(
        attempt_id=view.id,
        phase=_PHASES[view.phase],
        remaining_prefill_tokens=view.remaining_prefill_tokens,
        remaining_decode_tokens=view.remaining_decode_tokens,
        generated_tokens=view.generated_tokens,
        context_tokens=view.context_tokens,
        priority=view.priority.value,
        workload=view.workload,
        ignore_eos=view.ignore_eos,
        prompt_tokens=view.prompt_tokens,
        cached_tokens=view.cached_tokens,
        client=view.client,
    )


def _waiting(view: RequestView, due_in_s: float) -> pb.RequestStatus:
    """The fields that are not zero: there may be thousands of these."""
    return pb.RequestStatus(
        attempt_id=view.id,
        phase=pb.REQUEST_PHASE_QUEUED,
        remaining_prefill_tokens=view.remaining_prefill_tokens,
        remaining_decode_tokens=view.remaining_decode_tokens,
        generated_tokens=view.generated_tokens,
        priority=view.priority.value,
        workload=view.workload,
        ignore_eos=view.ignore_eos,
        prompt_tokens=view.prompt_tokens,
        due_in_s=due_in_s,
        client=view.client,
    )
