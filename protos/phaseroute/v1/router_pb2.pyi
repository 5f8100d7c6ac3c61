import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from phaseroute.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProbeOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROBE_OUTCOME_UNSPECIFIED: _ClassVar[ProbeOutcome]
    PROBE_OUTCOME_ANSWERED: _ClassVar[ProbeOutcome]
    PROBE_OUTCOME_LATE: _ClassVar[ProbeOutcome]
    PROBE_OUTCOME_FAILED: _ClassVar[ProbeOutcome]
    PROBE_OUTCOME_SKIPPED: _ClassVar[ProbeOutcome]

class BackendState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BACKEND_STATE_UNSPECIFIED: _ClassVar[BackendState]
    BACKEND_STATE_CONNECTING: _ClassVar[BackendState]
    BACKEND_STATE_SERVING: _ClassVar[BackendState]
    BACKEND_STATE_DRAINING: _ClassVar[BackendState]
    BACKEND_STATE_UNREACHABLE: _ClassVar[BackendState]

class BreakerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BREAKER_STATE_UNSPECIFIED: _ClassVar[BreakerState]
    BREAKER_STATE_CLOSED: _ClassVar[BreakerState]
    BREAKER_STATE_OPEN: _ClassVar[BreakerState]
    BREAKER_STATE_HALF_OPEN: _ClassVar[BreakerState]
PROBE_OUTCOME_UNSPECIFIED: ProbeOutcome
PROBE_OUTCOME_ANSWERED: ProbeOutcome
PROBE_OUTCOME_LATE: ProbeOutcome
PROBE_OUTCOME_FAILED: ProbeOutcome
PROBE_OUTCOME_SKIPPED: ProbeOutcome
BACKEND_STATE_UNSPECIFIED: BackendState
BACKEND_STATE_CONNECTING: BackendState
BACKEND_STATE_SERVING: BackendState
BACKEND_STATE_DRAINING: BackendState
BACKEND_STATE_UNREACHABLE: BackendState
BREAKER_STATE_UNSPECIFIED: BreakerState
BREAKER_STATE_CLOSED: BreakerState
BREAKER_STATE_OPEN: BreakerState
BREAKER_STATE_HALF_OPEN: BreakerState

class RouteRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.GenerateRequest
    def __init__(self, request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("id", "time", "policy", "max_new_tokens", "workload", "candidates", "selected", "reason", "probe_s", "choose_s", "attempt", "not_shortlisted", "generated_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROBE_S_FIELD_NUMBER: _ClassVar[int]
    CHOOSE_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NOT_SHORTLISTED_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    time: _timestamp_pb2.Timestamp
    policy: str
    max_new_tokens: int
    workload: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    selected: str
    reason: str
    probe_s: float
    choose_s: float
    attempt: int
    not_shortlisted: int
    generated_tokens: int
    def __init__(self, id: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., policy: _Optional[str] = ..., max_new_tokens: _Optional[int] = ..., workload: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., selected: _Optional[str] = ..., reason: _Optional[str] = ..., probe_s: _Optional[float] = ..., choose_s: _Optional[float] = ..., attempt: _Optional[int] = ..., not_shortlisted: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("backend", "excluded", "active", "queued", "prompt_tokens", "prompt_tokens_estimated", "reusable_tokens", "probe", "prefill_tokens", "decode_tokens", "isolated_rates", "score_s", "predicted_ttft_s", "status_age_s", "precision", "predicted_finish_s", "priced_by", "unfit", "forecast")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_ESTIMATED_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_RATES_FIELD_NUMBER: _ClassVar[int]
    SCORE_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    STATUS_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FINISH_S_FIELD_NUMBER: _ClassVar[int]
    PRICED_BY_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    backend: str
    excluded: str
    active: int
    queued: int
    prompt_tokens: int
    prompt_tokens_estimated: bool
    reusable_tokens: int
    probe: ProbeOutcome
    prefill_tokens: int
    decode_tokens: int
    isolated_rates: _inference_pb2.IsolatedRates
    score_s: float
    predicted_ttft_s: float
    status_age_s: float
    precision: str
    predicted_finish_s: float
    priced_by: str
    unfit: str
    forecast: Forecast
    def __init__(self, backend: _Optional[str] = ..., excluded: _Optional[str] = ..., active: _Optional[int] = ..., queued: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., prompt_tokens_estimated: _Optional[bool] = ..., reusable_tokens: _Optional[int] = ..., probe: _Optional[_Union[ProbeOutcome, str]] = ..., prefill_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., isolated_rates: _Optional[_Union[_inference_pb2.IsolatedRates, _Mapping]] = ..., score_s: _Optional[float] = ..., predicted_ttft_s: _Optional[float] = ..., status_age_s: _Optional[float] = ..., precision: _Optional[str] = ..., predicted_finish_s: _Optional[float] = ..., priced_by: _Optional[str] = ..., unfit: _Optional[str] = ..., forecast: _Optional[_Union[Forecast, _Mapping]] = ...) -> None: ...

class Forecast(_message.Message):
    __slots__ = ("expected_new_tokens", "delay_of_others_s", "step_model", "step_rules", "max_active", "elapsed_s", "running_s", "free_kv_tokens", "padded_kv", "active", "prefill_tokens", "decode_tokens", "context_tokens", "kv_tokens", "weights", "joined_s", "due_s", "own_kv_tokens", "own_due_s", "own_weight", "others_weight", "latest_weight", "delay_of_last_s")
    EXPECTED_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DELAY_OF_OTHERS_S_FIELD_NUMBER: _ClassVar[int]
    STEP_MODEL_FIELD_NUMBER: _ClassVar[int]
    STEP_RULES_FIELD_NUMBER: _ClassVar[int]
    MAX_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_S_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PADDED_KV_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    JOINED_S_FIELD_NUMBER: _ClassVar[int]
    DUE_S_FIELD_NUMBER: _ClassVar[int]
    OWN_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OWN_DUE_S_FIELD_NUMBER: _ClassVar[int]
    OWN_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    OTHERS_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LATEST_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DELAY_OF_LAST_S_FIELD_NUMBER: _ClassVar[int]
    expected_new_tokens: int
    delay_of_others_s: float
    step_model: _inference_pb2.StepModel
    step_rules: _inference_pb2.StepRules
    max_active: int
    elapsed_s: float
    running_s: float
    free_kv_tokens: int
    padded_kv: bool
    active: int
    prefill_tokens: _containers.RepeatedScalarFieldContainer[int]
    decode_tokens: _containers.RepeatedScalarFieldContainer[int]
    context_tokens: _containers.RepeatedScalarFieldContainer[int]
    kv_tokens: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    joined_s: _containers.RepeatedScalarFieldContainer[float]
    due_s: _containers.RepeatedScalarFieldContainer[float]
    own_kv_tokens: int
    own_due_s: float
    own_weight: float
    others_weight: float
    latest_weight: float
    delay_of_last_s: float
    def __init__(self, expected_new_tokens: _Optional[int] = ..., delay_of_others_s: _Optional[float] = ..., step_model: _Optional[_Union[_inference_pb2.StepModel, _Mapping]] = ..., step_rules: _Optional[_Union[_inference_pb2.StepRules, _Mapping]] = ..., max_active: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., running_s: _Optional[float] = ..., free_kv_tokens: _Optional[int] = ..., padded_kv: _Optional[bool] = ..., active: _Optional[int] = ..., prefill_tokens: _Optional[_Iterable[int]] = ..., decode_tokens: _Optional[_Iterable[int]] = ..., context_tokens: _Optional[_Iterable[int]] = ..., kv_tokens: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ..., joined_s: _Optional[_Iterable[float]] = ..., due_s: _Optional[_Iterable[float]] = ..., own_kv_tokens: _Optional[int] = ..., own_due_s: _Optional[float] = ..., own_weight: _Optional[float] = ..., others_weight: _Optional[float] = ..., latest_weight: _Optional[float] = ..., delay_of_last_s: _Optional[float] = ...) -> None: ...

class ListBackendsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBackendsResponse(_message.Message):
    __slots__ = ("backends",)
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    backends: _containers.RepeatedCompositeFieldContainer[BackendEntry]
    def __init__(self, backends: _Optional[_Iterable[_Union[BackendEntry, _Mapping]]] = ...) -> None: ...

class BackendEntry(_message.Message):
    __slots__ = ("name", "target", "state", "detail", "status", "status_age_s", "booked_requests", "left_out", "breaker")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATUS_AGE_S_FIELD_NUMBER: _ClassVar[int]
    BOOKED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    name: str
    target: str
    state: BackendState
    detail: str
    status: _inference_pb2.BackendStatus
    status_age_s: float
    booked_requests: int
    left_out: str
    breaker: Breaker
    def __init__(self, name: _Optional[str] = ..., target: _Optional[str] = ..., state: _Optional[_Union[BackendState, str]] = ..., detail: _Optional[str] = ..., status: _Optional[_Union[_inference_pb2.BackendStatus, _Mapping]] = ..., status_age_s: _Optional[float] = ..., booked_requests: _Optional[int] = ..., left_out: _Optional[str] = ..., breaker: _Optional[_Union[Breaker, _Mapping]] = ...) -> None: ...

class Breaker(_message.Message):
    __slots__ = ("state", "failures", "retry_in_s")
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    RETRY_IN_S_FIELD_NUMBER: _ClassVar[int]
    state: BreakerState
    failures: int
    retry_in_s: float
    def __init__(self, state: _Optional[_Union[BreakerState, str]] = ..., failures: _Optional[int] = ..., retry_in_s: _Optional[float] = ...) -> None: ...

class WatchDecisionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchDecisionsResponse(_message.Message):
    __slots__ = ("decision", "outcome")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    outcome: Outcome
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("decision_id", "code", "routing", "usage")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    code: str
    routing: _inference_pb2.RoutingRecord
    usage: _inference_pb2.Usage
    def __init__(self, decision_id: _Optional[str] = ..., code: _Optional[str] = ..., routing: _Optional[_Union[_inference_pb2.RoutingRecord, _Mapping]] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ...) -> None: ...

class DrainBackendRequest(_message.Message):
    __slots__ = ("backend", "undo", "grace_s")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    backend: str
    undo: bool
    grace_s: float
    def __init__(self, backend: _Optional[str] = ..., undo: _Optional[bool] = ..., grace_s: _Optional[float] = ...) -> None: ...

class DrainBackendResponse(_message.Message):
    __slots__ = ("backend",)
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    backend: BackendEntry
    def __init__(self, backend: _Optional[_Union[BackendEntry, _Mapping]] = ...) -> None: ...
