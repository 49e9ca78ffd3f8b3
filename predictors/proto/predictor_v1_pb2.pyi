from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PredictRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "token_ids", "messages", "served_model", "max_tokens", "cvar_level", "quantile_levels", "temperature", "declared_tier", "artifact_id", "timeout_s", "embedding", "tenant", "system_prompt_key", "generated_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CVAR_LEVEL_FIELD_NUMBER: _ClassVar[int]
    QUANTILE_LEVELS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    DECLARED_TIER_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_PROMPT_KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: str
    token_ids: TokenIds
    messages: ChatMessages
    served_model: str
    max_tokens: int
    cvar_level: float
    quantile_levels: _containers.RepeatedScalarFieldContainer[float]
    temperature: float
    declared_tier: int
    artifact_id: str
    timeout_s: float
    embedding: bool
    tenant: str
    system_prompt_key: int
    generated_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., served_model: _Optional[str] = ..., max_tokens: _Optional[int] = ..., cvar_level: _Optional[float] = ..., quantile_levels: _Optional[_Iterable[float]] = ..., temperature: _Optional[float] = ..., declared_tier: _Optional[int] = ..., artifact_id: _Optional[str] = ..., timeout_s: _Optional[float] = ..., embedding: _Optional[bool] = ..., tenant: _Optional[str] = ..., system_prompt_key: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessages(_message.Message):
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

class PredictResponse(_message.Message):
    __slots__ = ("request_id", "mu", "sigma", "nu", "artifact_id", "artifact_version", "truncated_length", "prompt_tokens", "truncated", "prompt_chars", "durations", "served_model_known", "urgency", "bucket_probabilities", "regression_tokens", "rank", "bucket", "cached", "bucket_edges", "median_tokens", "p90_tokens", "expected_tokens", "quantiles", "embedding", "corrected", "remaining", "missing")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MU_FIELD_NUMBER: _ClassVar[int]
    SIGMA_FIELD_NUMBER: _ClassVar[int]
    NU_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CHARS_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_KNOWN_FIELD_NUMBER: _ClassVar[int]
    URGENCY_FIELD_NUMBER: _ClassVar[int]
    BUCKET_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    REGRESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    BUCKET_EDGES_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    P90_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUANTILES_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    CORRECTED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    mu: float
    sigma: float
    nu: float
    artifact_id: str
    artifact_version: str
    truncated_length: TruncatedLength
    prompt_tokens: int
    truncated: bool
    prompt_chars: int
    durations: Durations
    served_model_known: bool
    urgency: Urgency
    bucket_probabilities: _containers.RepeatedScalarFieldContainer[float]
    regression_tokens: float
    rank: float
    bucket: int
    cached: bool
    bucket_edges: _containers.RepeatedScalarFieldContainer[float]
    median_tokens: float
    p90_tokens: float
    expected_tokens: float
    quantiles: _containers.RepeatedScalarFieldContainer[float]
    embedding: bytes
    corrected: bool
    remaining: RemainingLength
    missing: _containers.RepeatedCompositeFieldContainer[MissingPart]
    def __init__(self, request_id: _Optional[str] = ..., mu: _Optional[float] = ..., sigma: _Optional[float] = ..., nu: _Optional[float] = ..., artifact_id: _Optional[str] = ..., artifact_version: _Optional[str] = ..., truncated_length: _Optional[_Union[TruncatedLength, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., truncated: _Optional[bool] = ..., prompt_chars: _Optional[int] = ..., durations: _Optional[_Union[Durations, _Mapping]] = ..., served_model_known: _Optional[bool] = ..., urgency: _Optional[_Union[Urgency, _Mapping]] = ..., bucket_probabilities: _Optional[_Iterable[float]] = ..., regression_tokens: _Optional[float] = ..., rank: _Optional[float] = ..., bucket: _Optional[int] = ..., cached: _Optional[bool] = ..., bucket_edges: _Optional[_Iterable[float]] = ..., median_tokens: _Optional[float] = ..., p90_tokens: _Optional[float] = ..., expected_tokens: _Optional[float] = ..., quantiles: _Optional[_Iterable[float]] = ..., embedding: _Optional[bytes] = ..., corrected: _Optional[bool] = ..., remaining: _Optional[_Union[RemainingLength, _Mapping]] = ..., missing: _Optional[_Iterable[_Union[MissingPart, _Mapping]]] = ...) -> None: ...

class MissingPart(_message.Message):
    __slots__ = ("part", "reason")
    PART_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    part: str
    reason: str
    def __init__(self, part: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RemainingLength(_message.Message):
    __slots__ = ("generated_tokens", "expected_tokens", "quantiles")
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUANTILES_FIELD_NUMBER: _ClassVar[int]
    generated_tokens: int
    expected_tokens: float
    quantiles: _containers.RepeatedCompositeFieldContainer[Quantile]
    def __init__(self, generated_tokens: _Optional[int] = ..., expected_tokens: _Optional[float] = ..., quantiles: _Optional[_Iterable[_Union[Quantile, _Mapping]]] = ...) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("observations",)
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    observations: _containers.RepeatedCompositeFieldContainer[Observation]
    def __init__(self, observations: _Optional[_Iterable[_Union[Observation, _Mapping]]] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("request_id", "request", "output_tokens", "finished", "finish_reason", "max_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request: PredictRequest
    output_tokens: int
    finished: bool
    finish_reason: str
    max_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., request: _Optional[_Union[PredictRequest, _Mapping]] = ..., output_tokens: _Optional[int] = ..., finished: _Optional[bool] = ..., finish_reason: _Optional[str] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class ObserveResponse(_message.Message):
    __slots__ = ("num_accepted", "errors")
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    num_accepted: int
    errors: _containers.RepeatedCompositeFieldContainer[ObservationError]
    def __init__(self, num_accepted: _Optional[int] = ..., errors: _Optional[_Iterable[_Union[ObservationError, _Mapping]]] = ...) -> None: ...

class ObservationError(_message.Message):
    __slots__ = ("index", "field", "message")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    index: int
    field: str
    message: str
    def __init__(self, index: _Optional[int] = ..., field: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Urgency(_message.Message):
    __slots__ = ("probabilities", "level", "abstain", "effective_level", "abstain_threshold")
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    ABSTAIN_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_LEVEL_FIELD_NUMBER: _ClassVar[int]
    ABSTAIN_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    level: int
    abstain: bool
    effective_level: int
    abstain_threshold: float
    def __init__(self, probabilities: _Optional[_Iterable[float]] = ..., level: _Optional[int] = ..., abstain: _Optional[bool] = ..., effective_level: _Optional[int] = ..., abstain_threshold: _Optional[float] = ...) -> None: ...

class TruncatedLength(_message.Message):
    __slots__ = ("max_tokens", "expected_tokens", "cvar_level", "cvar_tokens", "quantiles")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CVAR_LEVEL_FIELD_NUMBER: _ClassVar[int]
    CVAR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUANTILES_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    expected_tokens: float
    cvar_level: float
    cvar_tokens: float
    quantiles: _containers.RepeatedCompositeFieldContainer[Quantile]
    def __init__(self, max_tokens: _Optional[int] = ..., expected_tokens: _Optional[float] = ..., cvar_level: _Optional[float] = ..., cvar_tokens: _Optional[float] = ..., quantiles: _Optional[_Iterable[_Union[Quantile, _Mapping]]] = ...) -> None: ...

class Quantile(_message.Message):
    __slots__ = ("level", "tokens")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    level: float
    tokens: float
    def __init__(self, level: _Optional[float] = ..., tokens: _Optional[float] = ...) -> None: ...

class Durations(_message.Message):
    __slots__ = ("tokenize_ns", "queue_ns", "inference_ns", "batch_size")
    TOKENIZE_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    tokenize_ns: int
    queue_ns: int
    inference_ns: int
    batch_size: int
    def __init__(self, tokenize_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., inference_ns: _Optional[int] = ..., batch_size: _Optional[int] = ...) -> None: ...

class PredictBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[PredictRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[PredictRequest, _Mapping]]] = ...) -> None: ...

class PredictBatchResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("prediction", "error")
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    prediction: PredictResponse
    error: PredictionError
    def __init__(self, prediction: _Optional[_Union[PredictResponse, _Mapping]] = ..., error: _Optional[_Union[PredictionError, _Mapping]] = ...) -> None: ...

class PredictionError(_message.Message):
    __slots__ = ("request_id", "code", "message", "field")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    code: int
    message: str
    field: str
    def __init__(self, request_id: _Optional[str] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class GetMetadataRequest(_message.Message):
    __slots__ = ("artifact_id",)
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    def __init__(self, artifact_id: _Optional[str] = ...) -> None: ...

class GetMetadataResponse(_message.Message):
    __slots__ = ("artifact_id", "artifact_version", "format_version", "served_models", "nu", "max_length_tokens", "truncation_side", "provider", "server_version", "max_batch_requests", "max_message_bytes", "heads", "conditioned_on_served_model", "conditioned_on_temperature", "accepts_unknown_models", "urgency_levels", "abstain_threshold", "bucket_edges", "artifact_ids", "max_prompt_chars", "quantile_levels", "learns", "conversations", "part_tokens")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODELS_FIELD_NUMBER: _ClassVar[int]
    NU_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_SIDE_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    CONDITIONED_ON_SERVED_MODEL_FIELD_NUMBER: _ClassVar[int]
    CONDITIONED_ON_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_UNKNOWN_MODELS_FIELD_NUMBER: _ClassVar[int]
    URGENCY_LEVELS_FIELD_NUMBER: _ClassVar[int]
    ABSTAIN_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    BUCKET_EDGES_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_CHARS_FIELD_NUMBER: _ClassVar[int]
    QUANTILE_LEVELS_FIELD_NUMBER: _ClassVar[int]
    LEARNS_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    PART_TOKENS_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    artifact_version: str
    format_version: int
    served_models: _containers.RepeatedScalarFieldContainer[str]
    nu: float
    max_length_tokens: int
    truncation_side: str
    provider: str
    server_version: str
    max_batch_requests: int
    max_message_bytes: int
    heads: _containers.RepeatedScalarFieldContainer[str]
    conditioned_on_served_model: bool
    conditioned_on_temperature: bool
    accepts_unknown_models: bool
    urgency_levels: _containers.RepeatedScalarFieldContainer[str]
    abstain_threshold: float
    bucket_edges: _containers.RepeatedScalarFieldContainer[float]
    artifact_ids: _containers.RepeatedScalarFieldContainer[str]
    max_prompt_chars: int
    quantile_levels: _containers.RepeatedScalarFieldContainer[float]
    learns: bool
    conversations: bool
    part_tokens: PartTokens
    def __init__(self, artifact_id: _Optional[str] = ..., artifact_version: _Optional[str] = ..., format_version: _Optional[int] = ..., served_models: _Optional[_Iterable[str]] = ..., nu: _Optional[float] = ..., max_length_tokens: _Optional[int] = ..., truncation_side: _Optional[str] = ..., provider: _Optional[str] = ..., server_version: _Optional[str] = ..., max_batch_requests: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., heads: _Optional[_Iterable[str]] = ..., conditioned_on_served_model: _Optional[bool] = ..., conditioned_on_temperature: _Optional[bool] = ..., accepts_unknown_models: _Optional[bool] = ..., urgency_levels: _Optional[_Iterable[str]] = ..., abstain_threshold: _Optional[float] = ..., bucket_edges: _Optional[_Iterable[float]] = ..., artifact_ids: _Optional[_Iterable[str]] = ..., max_prompt_chars: _Optional[int] = ..., quantile_levels: _Optional[_Iterable[float]] = ..., learns: _Optional[bool] = ..., conversations: _Optional[bool] = ..., part_tokens: _Optional[_Union[PartTokens, _Mapping]] = ...) -> None: ...

class PartTokens(_message.Message):
    __slots__ = ("options", "system", "turns", "last", "format_size")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FORMAT_SIZE_FIELD_NUMBER: _ClassVar[int]
    options: int
    system: int
    turns: int
    last: int
    format_size: bool
    def __init__(self, options: _Optional[int] = ..., system: _Optional[int] = ..., turns: _Optional[int] = ..., last: _Optional[int] = ..., format_size: _Optional[bool] = ...) -> None: ...
