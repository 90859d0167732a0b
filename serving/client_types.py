"""What a server says, as a client's user gets it: frozen, in the words of the verbs in process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from jaxstate import answer
from jaxstate.answer import Evidence, FinishReason, Source, Token
from jaxstate.serving import jaxstate_pb2 as pb

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of an answer: see Usage in jaxstate.proto."""

    prompt_tokens: int
    cached_tokens: int
    context_tokens: int
    answer_tokens: int
    forwarded_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptInfo:
    """What was asked, in tokens; of these, that had been computed before."""

    prompt_tokens: int
    cached_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(answer.Answer):
    """A finished answer as in process, and what it cost."""

    usage: Usage


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """A session as it was between two steps.

    Attributes:
      version: durable operations so far.
      context_len, frozen_len, evicted, cached_tokens: in tokens: what it sees, of that its prefix,
        what sliding dropped, and what others had computed of the prefix.
      rebuilt: see Session in jaxstate.proto.
      num_flash: registered questions.
    """

    session_id: str
    version: int
    context_len: int
    frozen_len: int
    evicted: int
    when_full: Literal["error", "slide"]
    cached_tokens: int
    rebuilt: bool
    num_flash: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashQuery:
    """A registered question.

    Attributes:
      flash_id: its id within the session.
      question: in token ids, as the server understood it.
      constraint: what the answer has to be: "json_schema", "regex" or "grammar", and its text.
      risk: of queries that do not say one.
      answer: the newest there is; None before the first.
      evaluations, hits, stale_hits, fires: see jaxstate.flash.FlashQuery.
      error: why it could not be computed, since the session last changed; "" = it could.
    """

    flash_id: int
    question: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    constraint: tuple[str, str] | None
    risk: float | None
    answer: Answer | None
    evaluations: int
    hits: int
    stale_hits: int
    fires: int
    error: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreshAnswer:
    """A registered question has been answered.

    Attributes:
      cursor: what comes behind this one is `session.watch(cursor)`; "" = it stands among others
        that come together, and only the last of these has one.
      missed: answers before this one may have been missed, for the server does not keep them any
        more.
    """

    cursor: str
    flash_id: int
    answer: Answer
    missed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaidAhead:
    """What `advance` decoded behind a header; `gap` is how the next token leads, in logits."""

    token_ids: tuple[int, ...]
    text: str
    gap: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation in the model's chat template."""

    text: str
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedSnapshot:
    """A saved session; `saved_at` in seconds since 1970."""

    name: str
    session_id: str
    version: int
    context_tokens: int
    size_bytes: int
    saved_at: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedSnapshots:
    """What is saved, by name; `damaged` are names of what cannot be read any more."""

    saved: tuple[SavedSnapshot, ...]
    damaged: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The model and the engine's sizes: see ModelInfo in jaxstate.proto."""

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
    eos_ids: tuple[int, ...]
    server_version: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassStats:
    """Verbs of one class: see ClassStats in jaxstate.proto."""

    name: str
    waiting: int
    ended: Mapping[str, int]
    tokens: int
    sojourn_p50_ms: float
    sojourn_p99_ms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """A server since its start: see Stats in jaxstate.proto."""

    sessions: int
    cells_used: int
    cells_held: int
    cells: int
    classes: Mapping[str, ClassStats]
    answers: Mapping[str, int]
    stale_answers: int
    entries_paid: int
    entries_used: int
    busy_seconds: float


def copied(kind: type[T], message: Any, **others: Any) -> T:
    """Return a record of a message's fields of the same names; `others` are those that differ."""
    assert dataclasses.is_dataclass(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in others]
    return kind(**{name: _plain(getattr(message, name)) for name in names}, **others)


def _plain(value: Any) -> Any:
    if isinstance(value, str | bytes | int | float):
        return value
    return dict(value) if isinstance(value, Mapping) else tuple(value)


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def session_info(message: pb.Session) -> SessionInfo:
    """Read how a session stands."""
    return copied(
        SessionInfo, message, context_len=message.context_tokens,
        frozen_len=message.prefix_tokens, evicted=message.evicted_tokens,
        num_flash=message.flash_queries,
        when_full="slide" if message.when_full == pb.WHEN_FULL_SLIDE else "error",
    )  # fmt: skip


def token(message: pb.Token) -> Token:
    """Read a token that was drawn."""
    return Token(
        token_id=message.token_id, text=message.text, logprob=_optional(message, "logprob"),
        top_logprobs=dict(message.top_logprobs) or None,
    )  # fmt: skip


def answer_of(message: pb.Answer, tokens: tuple[Token, ...] = ()) -> Answer:
    """Read an answer; `tokens` are those that were streamed before it."""
    usage = copied(Usage, message.usage)
    evidence = _optional(message, "evidence")
    return Answer(
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=FinishReason[_name(pb.FinishReason, message.finish_reason)],
        source=Source[_name(pb.Source, message.source)],
        version=message.version,
        context_len=usage.context_tokens,
        tokens_forwarded=usage.forwarded_tokens,
        gap=message.gap,
        cached_tokens=usage.cached_tokens,
        blocks_kept=_optional(message, "blocks_kept"),
        tokens=tokens,
        choice=_optional(message, "choice"),
        choice_logprobs=tuple(message.choice_logprobs) or None,
        rebuilt=message.rebuilt,
        age=message.age,
        evidence=evidence
        and copied(Evidence, evidence, num_effective=round(evidence.effective_samples)),
        usage=usage,
    )


def _name(enum: Any, value: int) -> str:
    """Return EOS for FINISH_REASON_EOS."""
    return enum.Name(value).rpartition("_")[2]


def flash_query(message: pb.FlashQuery) -> FlashQuery:
    """Read how a registered question stands."""
    asked = message.question
    newest = _optional(message, "answer")
    kind = asked.WhichOneof("constraint")
    return copied(
        FlashQuery, message, question=tuple(asked.prompt.tokens.ids),
        constraint=kind and (kind, getattr(asked, kind)),
        choices=tuple(tuple(choice.tokens.ids) for choice in asked.choices),
        max_new_tokens=asked.max_new_tokens, risk=_optional(message, "risk"),
        answer=newest and answer_of(newest), fires=message.gate_fires,
    )  # fmt: skip


def stats(message: pb.Stats) -> Stats:
    """Read how a server stands."""
    classes = {one.name: copied(ClassStats, one) for one in message.classes}
    return copied(Stats, message, classes=classes)
