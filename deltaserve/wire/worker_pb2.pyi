from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("worker_id", "role", "model_digest", "max_model_len", "max_num_seqs", "geometry", "segment", "vllm_version", "kv_cache_tokens", "dcp", "interleave", "state_bytes", "token_bytes", "capabilities", "reasoning_parser", "bundles", "early")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DCP_FIELD_NUMBER: _ClassVar[int]
    INTERLEAVE_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    model_digest: str
    max_model_len: int
    max_num_seqs: int
    geometry: str
    segment: str
    vllm_version: str
    kv_cache_tokens: int
    dcp: int
    interleave: int
    state_bytes: int
    token_bytes: int
    capabilities: str
    reasoning_parser: str
    bundles: bool
    early: bool
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., model_digest: _Optional[str] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., geometry: _Optional[str] = ..., segment: _Optional[str] = ..., vllm_version: _Optional[str] = ..., kv_cache_tokens: _Optional[int] = ..., dcp: _Optional[int] = ..., interleave: _Optional[int] = ..., state_bytes: _Optional[int] = ..., token_bytes: _Optional[int] = ..., capabilities: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., bundles: _Optional[bool] = ..., early: _Optional[bool] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("add", "abort", "release", "bundle", "confirm")
    ADD_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    add: Add
    abort: Abort
    release: Release
    bundle: Bundle
    confirm: Confirm
    def __init__(self, add: _Optional[_Union[Add, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., bundle: _Optional[_Union[Bundle, _Mapping]] = ..., confirm: _Optional[_Union[Confirm, _Mapping]] = ...) -> None: ...

class Bundle(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ToWorker]
    def __init__(self, messages: _Optional[_Iterable[_Union[ToWorker, _Mapping]]] = ...) -> None: ...

class Add(_message.Message):
    __slots__ = ("id", "request_id", "prompt", "sampling", "priority", "cache_salt", "arrival", "publish", "load", "timeout", "history", "traceparent", "reasoning_ended", "reasoning", "work")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_ENDED_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    id: int
    request_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: bytes
    priority: int
    cache_salt: str
    arrival: float
    publish: Publish
    load: Load
    timeout: float
    history: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    reasoning_ended: bool
    reasoning: bytes
    work: int
    def __init__(self, id: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[bytes] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., arrival: _Optional[float] = ..., publish: _Optional[_Union[Publish, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., timeout: _Optional[float] = ..., history: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ..., reasoning_ended: _Optional[bool] = ..., reasoning: _Optional[bytes] = ..., work: _Optional[int] = ...) -> None: ...

class Publish(_message.Message):
    __slots__ = ("preferred_segment", "pack_dcp", "pack_interleave", "early")
    PREFERRED_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PACK_DCP_FIELD_NUMBER: _ClassVar[int]
    PACK_INTERLEAVE_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    preferred_segment: str
    pack_dcp: int
    pack_interleave: int
    early: bool
    def __init__(self, preferred_segment: _Optional[str] = ..., pack_dcp: _Optional[int] = ..., pack_interleave: _Optional[int] = ..., early: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("boundary", "recompute", "early")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    boundary: str
    recompute: bool
    early: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, boundary: _Optional[str] = ..., recompute: _Optional[bool] = ..., early: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("boundaries",)
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    boundaries: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, boundaries: _Optional[_Iterable[str]] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("step", "published", "loaded", "status", "written")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    step: Step
    published: Published
    loaded: Loaded
    status: WorkerLoad
    written: Written
    def __init__(self, step: _Optional[_Union[Step, _Mapping]] = ..., published: _Optional[_Union[Published, _Mapping]] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ..., status: _Optional[_Union[WorkerLoad, _Mapping]] = ..., written: _Optional[_Union[Written, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("ids", "counts", "tokens", "finish", "rare")
    IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    RARE_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish: _containers.RepeatedScalarFieldContainer[int]
    rare: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., finish: _Optional[_Iterable[int]] = ..., rare: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("id", "boundary", "records")
    ID_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    boundary: str
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, id: _Optional[int] = ..., boundary: _Optional[str] = ..., records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("id", "committed", "boundary", "length", "bytes", "error", "cached_tokens", "store_tokens", "kind")
    ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    id: int
    committed: bool
    boundary: str
    length: int
    bytes: int
    error: str
    cached_tokens: int
    store_tokens: int
    kind: str
    def __init__(self, id: _Optional[int] = ..., committed: _Optional[bool] = ..., boundary: _Optional[str] = ..., length: _Optional[int] = ..., bytes: _Optional[int] = ..., error: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., store_tokens: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("id", "from_store", "local", "failure", "withdrawn")
    ID_FIELD_NUMBER: _ClassVar[int]
    FROM_STORE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    id: int
    from_store: int
    local: int
    failure: str
    withdrawn: bool
    def __init__(self, id: _Optional[int] = ..., from_store: _Optional[int] = ..., local: _Optional[int] = ..., failure: _Optional[str] = ..., withdrawn: _Optional[bool] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "kv_usage", "queued_tokens", "handoffs", "others")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_usage: float
    queued_tokens: int
    handoffs: _containers.RepeatedCompositeFieldContainer[Handoff]
    others: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., queued_tokens: _Optional[int] = ..., handoffs: _Optional[_Iterable[_Union[Handoff, _Mapping]]] = ..., others: _Optional[int] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("request_id", "stage", "boundary", "tokens", "age", "took", "state", "outcome", "ranks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    TOOK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    stage: str
    boundary: str
    tokens: int
    age: float
    took: float
    state: str
    outcome: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankProgress]
    def __init__(self, request_id: _Optional[str] = ..., stage: _Optional[str] = ..., boundary: _Optional[str] = ..., tokens: _Optional[int] = ..., age: _Optional[float] = ..., took: _Optional[float] = ..., state: _Optional[str] = ..., outcome: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankProgress, _Mapping]]] = ...) -> None: ...

class RankProgress(_message.Message):
    __slots__ = ("rank", "state", "bytes", "seconds", "failure")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    state: str
    bytes: int
    seconds: float
    failure: str
    def __init__(self, rank: _Optional[int] = ..., state: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., failure: _Optional[str] = ...) -> None: ...
