"""Messages of jaxstate.proto to and from what the verbs take and return, but for text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from jaxstate.answer import Answer, Evidence, FinishReason, Source, Token
from jaxstate.constraint import Constraint
from jaxstate.errors import InputError, UnknownSessionError
from jaxstate.flash import FlashQuery, Question
from jaxstate.sampling import Sampling
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import tenants
from jaxstate.serving.description import ServiceInfo, SessionInfo
from jaxstate.serving.questions import From, Stale
from jaxstate.serving.snapshot_store import SavedSnapshot
from jaxstate.session import WhenFull

_LONGEST_ID = 128

_WHEN_FULL: Mapping[int, WhenFull] = {
    pb.WHEN_FULL_UNSPECIFIED: "error",
    pb.WHEN_FULL_ERROR: "error",
    pb.WHEN_FULL_SLIDE: "slide",
}
_STALE: Mapping[int, Stale] = {
    pb.STALE_UNSPECIFIED: "compute",
    pb.STALE_COMPUTE: "compute",
    pb.STALE_WAIT: "wait",
    pb.STALE_SERVE: "serve",
}
_ENTRY: Mapping[int, From] = {
    pb.ENTRY_UNSPECIFIED: "question",
    pb.ENTRY_QUESTION: "question",
    pb.ENTRY_HEADER: "header",
}
_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CHOICE: pb.FINISH_REASON_CHOICE,
}
_SOURCES = {
    Source.COMPUTED: pb.SOURCE_COMPUTED,
    Source.RESUMED: pb.SOURCE_RESUMED,
    Source.FLASH: pb.SOURCE_FLASH,
    Source.GATED: pb.SOURCE_GATED,
}


# From clients


def session_id(given: str, tenant: str) -> str:
    """Return what the engine calls a session of a tenant's.

    Raises:
      InputError: it is no id.
      UnknownSessionError: the tenant can have no such session.
    """
    if not given:
        raise InputError("session_id: expected the id of a session, got none")
    name = tenants.qualified(tenant, _of_fair_length(given, "session_id"))
    if name is None:
        raise UnknownSessionError(given, ())
    return name


def new_session_id(given: str, tenant: str, field: str = "session_id") -> str | None:
    """Return what the engine shall call a new session of a tenant's; None = it chooses.

    Raises:
      InputError: characters that do not belong into an id.
    """
    if not given:
        return tenants.fresh(tenant)
    _of_fair_length(given, field)
    if not re.fullmatch(r"[A-Za-z0-9._:-]+", given):
        raise InputError(f"{field}: expected letters, digits, and . _ : - only, got {given!r}")
    return tenants.qualified(tenant, given)


def writer(given: str) -> str:
    """Return who appends.

    Raises:
      InputError: too long a name.
    """
    return _of_fair_length(given, "writer")


def _of_fair_length(given: str, field: str) -> str:
    if len(given) > _LONGEST_ID:
        raise InputError(f"{field}: expected at most {_LONGEST_ID} characters, got {len(given)}")
    return given


def when_full(given: int) -> WhenFull:
    """Return what a full session does."""
    return _named(given, _WHEN_FULL, "when_full")


def stale(given: int) -> Stale:
    """Return what to do with an answer of an older version."""
    return _named(given, _STALE, "stale")


def entry(given: int) -> From:
    """Return what may answer at a risk."""
    return _named(given, _ENTRY, "entry")


def _named(given: int, known: Mapping[int, str], field: str):
    if given not in known:
        raise InputError(f"{field}: expected one of {sorted(known)}, got {given}")
    return known[given]


def sampling(given: pb.Sampling) -> Sampling:
    """Return how tokens are drawn.

    Raises:
      InputError: out of range.
    """
    return Sampling(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        min_p=given.min_p,
        seed=given.seed,
        logit_bias=dict(given.logit_bias),
    )


def constraint(given: pb.Question) -> Constraint | None:
    """Return what an answer has to be; None = anything.

    Raises:
      InputError: it is empty or too long.
    """
    kind = given.WhichOneof("constraint")
    return Constraint(**{kind: getattr(given, kind)}) if kind else None


def number(given: float, field: str) -> float:
    """Return a number.

    Raises:
      InputError: it is NaN.
    """
    if math.isnan(given):
        raise InputError(f"{field}: expected a number, got NaN")
    return given


# To clients


def session(info: SessionInfo) -> pb.Session:
    """Say to its tenant how a session stands."""
    return pb.Session(
        session_id=tenants.unqualified(info.tenant, info.session_id),
        version=info.version,
        context_tokens=info.context_len,
        prefix_tokens=info.frozen_len,
        evicted_tokens=info.evicted,
        when_full=pb.WHEN_FULL_SLIDE if info.when_full == "slide" else pb.WHEN_FULL_ERROR,
        cached_tokens=info.cached_tokens,
        rebuilt=info.rebuilt,
        flash_queries=info.num_flash,
    )


def saved_snapshot(found: SavedSnapshot) -> pb.SavedSnapshot:
    """Say what was saved."""
    return pb.SavedSnapshot(
        name=found.name,
        session_id=found.session_id,
        version=found.version,
        context_tokens=found.context_len,
        size_bytes=found.size_bytes,
        saved_at=found.saved_at,
    )


def delta(tokens: Sequence[Token]) -> pb.AnswerPart:
    """Say what was drawn."""
    return pb.AnswerPart(delta=pb.Delta(tokens=[_token(token) for token in tokens]))


def _token(token: Token) -> pb.Token:
    return pb.Token(
        token_id=token.token_id,
        text=token.text,
        logprob=token.logprob,
        top_logprobs=token.top_logprobs or {},
    )


def answer(found: Answer, prompt_len: int) -> pb.Answer:
    """Say what was answered to a question or prompt of so many tokens."""
    # What is given without a step had been computed before, all of it.
    cached = found.cached_tokens if found.tokens_forwarded else prompt_len
    return pb.Answer(
        token_ids=found.token_ids,
        text=found.text,
        finish_reason=_REASONS[found.finish_reason],
        source=_SOURCES[found.source],
        version=found.version,
        age=found.age,
        usage=pb.Usage(
            prompt_tokens=prompt_len,
            cached_tokens=cached,
            context_tokens=found.context_len,
            answer_tokens=len(found.token_ids),
            forwarded_tokens=found.tokens_forwarded,
        ),
        gap=found.gap,
        choice=found.choice,
        choice_logprobs=found.choice_logprobs or (),
        evidence=_evidence(found.evidence),
        rebuilt=found.rebuilt,
        blocks_kept=found.blocks_kept,
    )


def _evidence(found: Evidence | None) -> pb.Evidence | None:
    if found is None:
        return None
    return pb.Evidence(
        gap=found.gap,
        tau=found.tau,
        risk=found.risk,
        bound=found.bound,
        effective_samples=found.num_effective,
        age=found.age,
    )


def flash_query(found: FlashQuery, tenant: str) -> pb.FlashQuery:
    """Say to a tenant how a registered question stands."""
    return pb.FlashQuery(
        flash_id=found.flash_id,
        question=_question(found.question),
        risk=found.risk,
        answer=answer(found.answer, len(found.question.token_ids)) if found.answer else None,
        evaluations=found.evaluations,
        hits=found.hits,
        stale_hits=found.stale_hits,
        gate_fires=found.fires,
        error=tenants.shown(tenant, str(found.error or "")),
    )


def _question(found: Question) -> pb.Question:
    drawn, held_to = found.sampling, found.constraint
    return pb.Question(
        **({held_to.kind: held_to.text} if held_to else {}),
        prompt=_tokens(found.token_ids),
        max_new_tokens=found.max_new_tokens,
        choices=[_tokens(choice) for choice in found.choices],
        eos_ids=found.eos_ids,
        ignore_model_eos=True,  # they are among eos_ids
        sampling=pb.Sampling(
            temperature=drawn.temperature,
            top_k=drawn.top_k,
            top_p=drawn.top_p,
            min_p=drawn.min_p,
            seed=drawn.seed,
            logit_bias=drawn.logit_bias,
        ),
    )


def _tokens(token_ids: Sequence[int]) -> pb.Prompt:
    return pb.Prompt(tokens=pb.TokenIds(ids=token_ids))


def stats(info: ServiceInfo) -> pb.Stats:
    """Say how the service stands."""
    return pb.Stats(
        sessions=info.num_sessions,
        cells_used=info.cells_used,
        cells_held=info.cells_held,
        cells=info.cells,
        classes=[
            pb.ClassStats(
                name=name,
                waiting=one.waiting,
                ended=one.ended,
                tokens=one.tokens,
                sojourn_p50_ms=one.sojourn_p50_s * 1e3,
                sojourn_p99_ms=one.sojourn_p99_s * 1e3,
            )
            for name, one in info.classes.items()
        ],
        answers=info.answers,
        stale_answers=info.stale_answers,
        entries_paid=info.entries_paid,
        entries_used=info.entries_used,
        busy_seconds=info.busy_s,
    )
