from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WhenFull(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHEN_FULL_UNSPECIFIED: _ClassVar[WhenFull]
    WHEN_FULL_ERROR: _ClassVar[WhenFull]
    WHEN_FULL_SLIDE: _ClassVar[WhenFull]

class Stale(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STALE_UNSPECIFIED: _ClassVar[Stale]
    STALE_COMPUTE: _ClassVar[Stale]
    STALE_WAIT: _ClassVar[Stale]
    STALE_SERVE: _ClassVar[Stale]

class Entry(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENTRY_UNSPECIFIED: _ClassVar[Entry]
    ENTRY_QUESTION: _ClassVar[Entry]
    ENTRY_HEADER: _ClassVar[Entry]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CHOICE: _ClassVar[FinishReason]

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_UNSPECIFIED: _ClassVar[Source]
    SOURCE_COMPUTED: _ClassVar[Source]
    SOURCE_RESUMED: _ClassVar[Source]
    SOURCE_FLASH: _ClassVar[Source]
    SOURCE_GATED: _ClassVar[Source]
WHEN_FULL_UNSPECIFIED: WhenFull
WHEN_FULL_ERROR: WhenFull
WHEN_FULL_SLIDE: WhenFull
STALE_UNSPECIFIED: Stale
STALE_COMPUTE: Stale
STALE_WAIT: Stale
STALE_SERVE: Stale
ENTRY_UNSPECIFIED: Entry
ENTRY_QUESTION: Entry
ENTRY_HEADER: Entry
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CHOICE: FinishReason
SOURCE_UNSPECIFIED: Source
SOURCE_COMPUTED: Source
SOURCE_RESUMED: Source
SOURCE_FLASH: Source
SOURCE_GATED: Source

class Prompt(_message.Message):
    __slots__ = ("tokens", "text", "chat")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    tokens: TokenIds
    text: Text
    chat: Chat
    def __init__(self, tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., text: _Optional[_Union[Text, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Text(_message.Message):
    __slots__ = ("text", "parse_special")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    text: str
    parse_special: bool
    def __init__(self, text: _Optional[str] = ..., parse_special: bool = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "without_generation_prompt", "tools_json", "variables_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    without_generation_prompt: bool
    tools_json: str
    variables_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., without_generation_prompt: bool = ..., tools_json: _Optional[str] = ..., variables_json: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("session_id", "prefix", "when_full")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    WHEN_FULL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prefix: Prompt
    when_full: WhenFull
    def __init__(self, session_id: _Optional[str] = ..., prefix: _Optional[_Union[Prompt, _Mapping]] = ..., when_full: _Optional[_Union[WhenFull, str]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "version", "context_tokens", "prefix_tokens", "evicted_tokens", "when_full", "cached_tokens", "rebuilt", "flash_queries")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WHEN_FULL_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REBUILT_FIELD_NUMBER: _ClassVar[int]
    FLASH_QUERIES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    version: int
    context_tokens: int
    prefix_tokens: int
    evicted_tokens: int
    when_full: WhenFull
    cached_tokens: int
    rebuilt: bool
    flash_queries: int
    def __init__(self, session_id: _Optional[str] = ..., version: _Optional[int] = ..., context_tokens: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., evicted_tokens: _Optional[int] = ..., when_full: _Optional[_Union[WhenFull, str]] = ..., cached_tokens: _Optional[int] = ..., rebuilt: bool = ..., flash_queries: _Optional[int] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("session_id", "new_session_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    new_session_id: str
    def __init__(self, session_id: _Optional[str] = ..., new_session_id: _Optional[str] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("session_id", "name")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    name: str
    def __init__(self, session_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class SavedSnapshot(_message.Message):
    __slots__ = ("name", "session_id", "version", "context_tokens", "size_bytes", "saved_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    session_id: str
    version: int
    context_tokens: int
    size_bytes: int
    saved_at: float
    def __init__(self, name: _Optional[str] = ..., session_id: _Optional[str] = ..., version: _Optional[int] = ..., context_tokens: _Optional[int] = ..., size_bytes: _Optional[int] = ..., saved_at: _Optional[float] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("name", "session_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    session_id: str
    def __init__(self, name: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class ListSnapshotsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSnapshotsResponse(_message.Message):
    __slots__ = ("snapshots", "damaged")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[SavedSnapshot]
    damaged: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, snapshots: _Optional[_Iterable[_Union[SavedSnapshot, _Mapping]]] = ..., damaged: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteSnapshotRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("session_id", "prompt", "writer", "sequence")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prompt: Prompt
    writer: str
    sequence: int
    def __init__(self, session_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., writer: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("version", "tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: int
    tokens: int
    def __init__(self, version: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class AppendStreamResponse(_message.Message):
    __slots__ = ("version", "appends", "tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    APPENDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: int
    appends: int
    tokens: int
    def __init__(self, version: _Optional[int] = ..., appends: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("session_id", "prompt", "writer", "sequence")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prompt: Prompt
    writer: str
    sequence: int
    def __init__(self, session_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., writer: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class UpdateResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("session_id", "tokens", "writer", "sequence")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tokens: int
    writer: str
    sequence: int
    def __init__(self, session_id: _Optional[str] = ..., tokens: _Optional[int] = ..., writer: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("prompt", "max_new_tokens", "choices", "eos_ids", "ignore_model_eos", "sampling", "json_schema", "regex", "grammar")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_MODEL_EOS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    max_new_tokens: int
    choices: _containers.RepeatedCompositeFieldContainer[Prompt]
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_model_eos: bool
    sampling: Sampling
    json_schema: str
    regex: str
    grammar: str
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., eos_ids: _Optional[_Iterable[int]] = ..., ignore_model_eos: bool = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ...) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("session_id", "question", "stop", "top_logprobs", "commit", "stale", "risk", "entry", "min_version")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    RISK_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    question: Question
    stop: _containers.RepeatedScalarFieldContainer[str]
    top_logprobs: int
    commit: bool
    stale: Stale
    risk: float
    entry: Entry
    min_version: int
    def __init__(self, session_id: _Optional[str] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., top_logprobs: _Optional[int] = ..., commit: bool = ..., stale: _Optional[_Union[Stale, str]] = ..., risk: _Optional[float] = ..., entry: _Optional[_Union[Entry, str]] = ..., min_version: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("question", "stop", "top_logprobs")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    question: Question
    stop: _containers.RepeatedScalarFieldContainer[str]
    top_logprobs: int
    def __init__(self, question: _Optional[_Union[Question, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class AnswerPart(_message.Message):
    __slots__ = ("prompt", "delta", "answer")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    prompt: PromptInfo
    delta: Delta
    answer: Answer
    def __init__(self, prompt: _Optional[_Union[PromptInfo, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ...) -> None: ...

class PromptInfo(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("token_id", "text", "logprob", "top_logprobs")
    class TopLogprobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    logprob: float
    top_logprobs: _containers.ScalarMap[int, float]
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Mapping[int, float]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "context_tokens", "answer_tokens", "forwarded_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    context_tokens: int
    answer_tokens: int
    forwarded_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., answer_tokens: _Optional[int] = ..., forwarded_tokens: _Optional[int] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("gap", "tau", "risk", "bound", "effective_samples", "age")
    GAP_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    RISK_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    gap: float
    tau: float
    risk: float
    bound: float
    effective_samples: float
    age: int
    def __init__(self, gap: _Optional[float] = ..., tau: _Optional[float] = ..., risk: _Optional[float] = ..., bound: _Optional[float] = ..., effective_samples: _Optional[float] = ..., age: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("token_ids", "text", "finish_reason", "source", "version", "age", "usage", "gap", "choice", "choice_logprobs", "evidence", "rebuilt", "blocks_kept")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    REBUILT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_KEPT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish_reason: FinishReason
    source: Source
    version: int
    age: int
    usage: Usage
    gap: float
    choice: int
    choice_logprobs: _containers.RepeatedScalarFieldContainer[float]
    evidence: Evidence
    rebuilt: bool
    blocks_kept: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., source: _Optional[_Union[Source, str]] = ..., version: _Optional[int] = ..., age: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., gap: _Optional[float] = ..., choice: _Optional[int] = ..., choice_logprobs: _Optional[_Iterable[float]] = ..., evidence: _Optional[_Union[Evidence, _Mapping]] = ..., rebuilt: bool = ..., blocks_kept: _Optional[float] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("session_id", "question", "risk")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    RISK_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    question: Question
    risk: float
    def __init__(self, session_id: _Optional[str] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., risk: _Optional[float] = ...) -> None: ...

class FlashQuery(_message.Message):
    __slots__ = ("flash_id", "question", "risk", "answer", "evaluations", "hits", "stale_hits", "gate_fires", "error")
    FLASH_ID_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    RISK_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    STALE_HITS_FIELD_NUMBER: _ClassVar[int]
    GATE_FIRES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    flash_id: int
    question: Question
    risk: float
    answer: Answer
    evaluations: int
    hits: int
    stale_hits: int
    gate_fires: int
    error: str
    def __init__(self, flash_id: _Optional[int] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., risk: _Optional[float] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., evaluations: _Optional[int] = ..., hits: _Optional[int] = ..., stale_hits: _Optional[int] = ..., gate_fires: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class UnregisterRequest(_message.Message):
    __slots__ = ("session_id", "flash_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FLASH_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    flash_id: int
    def __init__(self, session_id: _Optional[str] = ..., flash_id: _Optional[int] = ...) -> None: ...

class UnregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListFlashQueriesRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListFlashQueriesResponse(_message.Message):
    __slots__ = ("queries",)
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    queries: _containers.RepeatedCompositeFieldContainer[FlashQuery]
    def __init__(self, queries: _Optional[_Iterable[_Union[FlashQuery, _Mapping]]] = ...) -> None: ...

class WatchAnswersRequest(_message.Message):
    __slots__ = ("session_id", "cursor")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    cursor: str
    def __init__(self, session_id: _Optional[str] = ..., cursor: _Optional[str] = ...) -> None: ...

class FreshAnswer(_message.Message):
    __slots__ = ("cursor", "flash_id", "answer")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FLASH_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    flash_id: int
    answer: Answer
    def __init__(self, cursor: _Optional[str] = ..., flash_id: _Optional[int] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("prompt", "max_new_tokens", "min_gap", "eos_ids", "slot_ids")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_GAP_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_IDS_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    max_new_tokens: int
    min_gap: float
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    slot_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., min_gap: _Optional[float] = ..., eos_ids: _Optional[_Iterable[int]] = ..., slot_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AdvanceRequest(_message.Message):
    __slots__ = ("session_id", "header")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    header: Header
    def __init__(self, session_id: _Optional[str] = ..., header: _Optional[_Union[Header, _Mapping]] = ...) -> None: ...

class AdvanceResponse(_message.Message):
    __slots__ = ("token_ids", "text", "gap")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    gap: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., gap: _Optional[float] = ...) -> None: ...

class DeclareRequest(_message.Message):
    __slots__ = ("session_id", "header")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    header: Header
    def __init__(self, session_id: _Optional[str] = ..., header: _Optional[_Union[Header, _Mapping]] = ...) -> None: ...

class DeclareResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "parse_special", "add_bos", "continues")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    text: str
    parse_special: bool
    add_bos: bool
    continues: bool
    def __init__(self, text: _Optional[str] = ..., parse_special: bool = ..., add_bos: bool = ..., continues: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class RenderTemplateRequest(_message.Message):
    __slots__ = ("chat",)
    CHAT_FIELD_NUMBER: _ClassVar[int]
    chat: Chat
    def __init__(self, chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class RenderTemplateResponse(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "family", "vocab_size", "num_layers", "max_positions", "context_tokens", "page_size", "cells", "bytes_per_cell", "has_tokenizer", "has_chat_template", "eos_ids", "server_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_CELL_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    family: str
    vocab_size: int
    num_layers: int
    max_positions: int
    context_tokens: int
    page_size: int
    cells: int
    bytes_per_cell: int
    has_tokenizer: bool
    has_chat_template: bool
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    server_version: str
    def __init__(self, name: _Optional[str] = ..., family: _Optional[str] = ..., vocab_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., max_positions: _Optional[int] = ..., context_tokens: _Optional[int] = ..., page_size: _Optional[int] = ..., cells: _Optional[int] = ..., bytes_per_cell: _Optional[int] = ..., has_tokenizer: bool = ..., has_chat_template: bool = ..., eos_ids: _Optional[_Iterable[int]] = ..., server_version: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClassStats(_message.Message):
    __slots__ = ("name", "waiting", "ended", "tokens", "sojourn_p50_ms", "sojourn_p99_ms")
    class EndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOJOURN_P50_MS_FIELD_NUMBER: _ClassVar[int]
    SOJOURN_P99_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    waiting: int
    ended: _containers.ScalarMap[str, int]
    tokens: int
    sojourn_p50_ms: float
    sojourn_p99_ms: float
    def __init__(self, name: _Optional[str] = ..., waiting: _Optional[int] = ..., ended: _Optional[_Mapping[str, int]] = ..., tokens: _Optional[int] = ..., sojourn_p50_ms: _Optional[float] = ..., sojourn_p99_ms: _Optional[float] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("sessions", "cells_used", "cells_held", "cells", "classes", "answers", "stale_answers", "entries_paid", "entries_used", "busy_seconds")
    class AnswersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CELLS_USED_FIELD_NUMBER: _ClassVar[int]
    CELLS_HELD_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    STALE_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_PAID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_USED_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    cells_used: int
    cells_held: int
    cells: int
    classes: _containers.RepeatedCompositeFieldContainer[ClassStats]
    answers: _containers.ScalarMap[str, int]
    stale_answers: int
    entries_paid: int
    entries_used: int
    busy_seconds: float
    def __init__(self, sessions: _Optional[int] = ..., cells_used: _Optional[int] = ..., cells_held: _Optional[int] = ..., cells: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[ClassStats, _Mapping]]] = ..., answers: _Optional[_Mapping[str, int]] = ..., stale_answers: _Optional[int] = ..., entries_paid: _Optional[int] = ..., entries_used: _Optional[int] = ..., busy_seconds: _Optional[float] = ...) -> None: ...
