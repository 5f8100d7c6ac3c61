"""A forecast's inputs and result on the wire, and the forecast played again from there."""

from __future__ import annotations

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from router_service.forecast import Forecast, Job, Load, forecast
from service_kit.step_time import StepModel


def forecast_to_proto(
    load: Load, own: Job, *, delay_of_others_s: float, delay_of_last_s: float, weights: tuple[float, float, float]
) -> router_pb2.Forecast:
    """Everything that `replay` needs."""
    model, jobs = load.model, load.jobs
    rules = pb.StepRules(step_tokens=load.step_tokens, promote_batch_after_s=load.line.promote_batch_after_s)
    if load.step_target_s is not None:
        rules.step_target_s = load.step_target_s
    return router_pb2.Forecast(
        expected_new_tokens=own.decode_tokens,
        delay_of_others_s=delay_of_others_s,
        step_model=pb.StepModel(
            base_s=model.base_s,
            per_token_s=model.per_token_s,
            per_row_s=model.per_row_s,
            per_attended_s=model.per_attended_s,
            samples=model.samples,
            residual_p90_s=model.residual_p90_s,
            row_corrections=[pb.RowCorrection(rows=rows, seconds=extra_s) for rows, extra_s in model.row_corrections_s],
        ),
        step_rules=rules,
        max_active=load.max_active,
        elapsed_s=load.elapsed_s,
        running_s=load.running_s,
        free_kv_tokens=load.free_kv_tokens,
        padded_kv=load.padded_kv,
        active=len(load.active),
        prefill_tokens=[job.prefill_tokens for job in jobs],
        decode_tokens=[job.decode_tokens for job in jobs],
        context_tokens=[job.context_tokens for job in jobs],
        kv_tokens=[job.kv_tokens for job in jobs],
        weights=[job.weight for job in jobs],
        joined_s=[job.joined_s for job in jobs],
        due_s=[job.due_s for job in jobs],
        own_kv_tokens=own.kv_tokens,
        own_due_s=own.due_s,
        own_weight=own.weight,
        others_weight=weights[1],
        delay_of_last_s=delay_of_last_s,
        latest_weight=weights[2],
    )


def replay(candidate: router_pb2.Candidate) -> Forecast:
    """The same forecast again, from a candidate of a recorded decision."""
    wire = candidate.forecast
    rules = wire.step_rules
    jobs = tuple(
        Job(*columns)
        for columns in zip(
            wire.prefill_tokens,
            wire.decode_tokens,
            wire.context_tokens,
            wire.kv_tokens,
            wire.weights,
            wire.joined_s,
            wire.due_s,
            strict=True,
        )
    )
    model = wire.step_model
    load = Load(
        model=StepModel(
            model.base_s,
            model.per_token_s,
            model.per_row_s,
            model.per_attended_s,
            model.samples,
            model.residual_p90_s,
            tuple((knot.rows, knot.seconds) for knot in model.row_corrections),
        ),
        max_active=wire.max_active,
        step_tokens=rules.step_tokens,
        step_target_s=rules.step_target_s if rules.HasField("step_target_s") else None,
        free_kv_tokens=wire.free_kv_tokens,
        padded_kv=wire.padded_kv,
        active=jobs[: wire.active],
        waiting=jobs[wire.active :],
        running_s=wire.running_s,
        elapsed_s=wire.elapsed_s,
    )
    own = Job(
        prefill_tokens=max(1, candidate.prompt_tokens - candidate.reusable_tokens),
        decode_tokens=wire.expected_new_tokens,
        context_tokens=candidate.reusable_tokens,
        kv_tokens=wire.own_kv_tokens,
        weight=wire.own_weight,
        joined_s=wire.elapsed_s,
        due_s=wire.own_due_s,
    )
    return forecast(load, own)
