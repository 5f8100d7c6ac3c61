from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_INTERACTIVE: _ClassVar[Priority]
    PRIORITY_BATCH: _ClassVar[Priority]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]

class RequestPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_PHASE_UNSPECIFIED: _ClassVar[RequestPhase]
    REQUEST_PHASE_QUEUED: _ClassVar[RequestPhase]
    REQUEST_PHASE_PREFILL: _ClassVar[RequestPhase]
    REQUEST_PHASE_DECODE: _ClassVar[RequestPhase]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_INTERACTIVE: Priority
PRIORITY_BATCH: Priority
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP: FinishReason
REQUEST_PHASE_UNSPECIFIED: RequestPhase
REQUEST_PHASE_QUEUED: RequestPhase
REQUEST_PHASE_PREFILL: RequestPhase
REQUEST_PHASE_DECODE: RequestPhase

class Prompt(_message.Message):
    __slots__ = ("text", "chat", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ...) -> None: ...

class RoutingHints(_message.Message):
    __slots__ = ("policy", "backend", "excluded_backends", "precision", "ttft_slo_s")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_BACKENDS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    policy: str
    backend: str
    excluded_backends: _containers.RepeatedScalarFieldContainer[str]
    precision: str
    ttft_slo_s: float
    def __init__(self, policy: _Optional[str] = ..., backend: _Optional[str] = ..., excluded_backends: _Optional[_Iterable[str]] = ..., precision: _Optional[str] = ..., ttft_slo_s: _Optional[float] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("id", "reusable_tokens", "generated_token_ids", "client", "cache_salt", "client_weight")
    ID_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    id: str
    reusable_tokens: int
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    client: str
    cache_salt: str
    client_weight: float
    def __init__(self, id: _Optional[str] = ..., reusable_tokens: _Optional[int] = ..., generated_token_ids: _Optional[_Iterable[int]] = ..., client: _Optional[str] = ..., cache_salt: _Optional[str] = ..., client_weight: _Optional[float] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "max_new_tokens", "sampling", "stop", "ignore_eos", "workload", "model", "routing", "attempt", "priority")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    max_new_tokens: int
    sampling: Sampling
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    workload: str
    model: str
    routing: RoutingHints
    attempt: Attempt
    priority: Priority
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., workload: _Optional[str] = ..., model: _Optional[str] = ..., routing: _Optional[_Union[RoutingHints, _Mapping]] = ..., attempt: _Optional[_Union[Attempt, _Mapping]] = ..., priority: _Optional[_Union[Priority, str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("delta", "finished")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    delta: Delta
    finished: Finished
    def __init__(self, delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "usage", "timings", "routing")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    routing: RoutingRecord
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., routing: _Optional[_Union[RoutingRecord, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "generated_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "decode_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    decode_s: float
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class RoutingRecord(_message.Message):
    __slots__ = ("decision_id", "policy", "backend", "attempts", "predicted_ttft_s", "predicted_finish_s", "actual_ttft_s", "actual_finish_s", "predicted_new_tokens", "continuations")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FINISH_S_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_FINISH_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    policy: str
    backend: str
    attempts: int
    predicted_ttft_s: float
    predicted_finish_s: float
    actual_ttft_s: float
    actual_finish_s: float
    predicted_new_tokens: float
    continuations: int
    def __init__(self, decision_id: _Optional[str] = ..., policy: _Optional[str] = ..., backend: _Optional[str] = ..., attempts: _Optional[int] = ..., predicted_ttft_s: _Optional[float] = ..., predicted_finish_s: _Optional[float] = ..., actual_ttft_s: _Optional[float] = ..., actual_finish_s: _Optional[float] = ..., predicted_new_tokens: _Optional[float] = ..., continuations: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: BackendStatus
    def __init__(self, status: _Optional[_Union[BackendStatus, _Mapping]] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: BackendStatus
    def __init__(self, status: _Optional[_Union[BackendStatus, _Mapping]] = ...) -> None: ...

class BackendStatus(_message.Message):
    __slots__ = ("incarnation", "sequence", "model", "engine", "max_active", "max_queued", "requests", "kv_cache", "isolated_rates", "step_model", "draining", "seconds_since_progress", "scheduling_policy", "max_active_reason", "step_rules", "max_queued_tokens")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MAX_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_RATES_FIELD_NUMBER: _ClassVar[int]
    STEP_MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_ACTIVE_REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_RULES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    sequence: int
    model: ModelInfo
    engine: EngineInfo
    max_active: int
    max_queued: int
    requests: _containers.RepeatedCompositeFieldContainer[RequestStatus]
    kv_cache: KvCacheStatus
    isolated_rates: IsolatedRates
    step_model: StepModel
    draining: bool
    seconds_since_progress: float
    scheduling_policy: str
    max_active_reason: str
    step_rules: StepRules
    max_queued_tokens: int
    def __init__(self, incarnation: _Optional[str] = ..., sequence: _Optional[int] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., engine: _Optional[_Union[EngineInfo, _Mapping]] = ..., max_active: _Optional[int] = ..., max_queued: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[RequestStatus, _Mapping]]] = ..., kv_cache: _Optional[_Union[KvCacheStatus, _Mapping]] = ..., isolated_rates: _Optional[_Union[IsolatedRates, _Mapping]] = ..., step_model: _Optional[_Union[StepModel, _Mapping]] = ..., draining: _Optional[bool] = ..., seconds_since_progress: _Optional[float] = ..., scheduling_policy: _Optional[str] = ..., max_active_reason: _Optional[str] = ..., step_rules: _Optional[_Union[StepRules, _Mapping]] = ..., max_queued_tokens: _Optional[int] = ...) -> None: ...

class StepRules(_message.Message):
    __slots__ = ("step_tokens", "step_target_s", "promote_batch_after_s")
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    PROMOTE_BATCH_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    step_tokens: int
    step_target_s: float
    promote_batch_after_s: float
    def __init__(self, step_tokens: _Optional[int] = ..., step_target_s: _Optional[float] = ..., promote_batch_after_s: _Optional[float] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "fingerprint", "context_tokens", "tokenizer_fingerprint", "precision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    context_tokens: int
    tokenizer_fingerprint: str
    precision: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., context_tokens: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., precision: _Optional[str] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("name", "device", "simulated")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    device: str
    simulated: bool
    def __init__(self, name: _Optional[str] = ..., device: _Optional[str] = ..., simulated: _Optional[bool] = ...) -> None: ...

class RequestStatus(_message.Message):
    __slots__ = ("attempt_id", "phase", "remaining_prefill_tokens", "remaining_decode_tokens", "generated_tokens", "context_tokens", "priority", "workload", "ignore_eos", "prompt_tokens", "cached_tokens", "due_in_s", "client")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DUE_IN_S_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    phase: RequestPhase
    remaining_prefill_tokens: int
    remaining_decode_tokens: int
    generated_tokens: int
    context_tokens: int
    priority: Priority
    workload: str
    ignore_eos: bool
    prompt_tokens: int
    cached_tokens: int
    due_in_s: float
    client: str
    def __init__(self, attempt_id: _Optional[str] = ..., phase: _Optional[_Union[RequestPhase, str]] = ..., remaining_prefill_tokens: _Optional[int] = ..., remaining_decode_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., priority: _Optional[_Union[Priority, str]] = ..., workload: _Optional[str] = ..., ignore_eos: _Optional[bool] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., due_in_s: _Optional[float] = ..., client: _Optional[str] = ...) -> None: ...

class KvCacheStatus(_message.Message):
    __slots__ = ("capacity_tokens", "used_tokens", "retained_tokens", "reserved_tokens", "host_tokens", "host_capacity_tokens", "padded")
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PADDED_FIELD_NUMBER: _ClassVar[int]
    capacity_tokens: int
    used_tokens: int
    retained_tokens: int
    reserved_tokens: int
    host_tokens: int
    host_capacity_tokens: int
    padded: bool
    def __init__(self, capacity_tokens: _Optional[int] = ..., used_tokens: _Optional[int] = ..., retained_tokens: _Optional[int] = ..., reserved_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., host_capacity_tokens: _Optional[int] = ..., padded: _Optional[bool] = ...) -> None: ...

class IsolatedRates(_message.Message):
    __slots__ = ("prefill_tokens_per_s", "decode_tokens_per_s")
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    def __init__(self, prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ...) -> None: ...

class StepModel(_message.Message):
    __slots__ = ("base_s", "per_token_s", "per_row_s", "per_attended_s", "samples", "residual_p90_s", "row_corrections", "age_s")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PER_ROW_S_FIELD_NUMBER: _ClassVar[int]
    PER_ATTENDED_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_P90_S_FIELD_NUMBER: _ClassVar[int]
    ROW_CORRECTIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    per_token_s: float
    per_row_s: float
    per_attended_s: float
    samples: int
    residual_p90_s: float
    row_corrections: _containers.RepeatedCompositeFieldContainer[RowCorrection]
    age_s: float
    def __init__(self, base_s: _Optional[float] = ..., per_token_s: _Optional[float] = ..., per_row_s: _Optional[float] = ..., per_attended_s: _Optional[float] = ..., samples: _Optional[int] = ..., residual_p90_s: _Optional[float] = ..., row_corrections: _Optional[_Iterable[_Union[RowCorrection, _Mapping]]] = ..., age_s: _Optional[float] = ...) -> None: ...

class RowCorrection(_message.Message):
    __slots__ = ("rows", "seconds")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    seconds: float
    def __init__(self, rows: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class CacheProbeRequest(_message.Message):
    __slots__ = ("prompt", "cache_salt")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    cache_salt: str
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class CacheProbeResponse(_message.Message):
    __slots__ = ("prompt_tokens", "reusable_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    reusable_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., reusable_tokens: _Optional[int] = ...) -> None: ...
